# SPDX-License-Identifier: MIT
"""Devices that no machine of these tests has, as what their drivers tell of them.

opencl_limits.c shows such a device in the place of a real one. A comment names the dump of clinfo,
or the source, that a row's numbers are from. What it has in brackets is in no public dump that was
found, and is a neighbour's. Extensions that no kernel can use, such as those of images, are left
out.
"""

from dataclasses import dataclass, fields, replace

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Of memory that host and device share by pointers: whole buffers, parts of buffers.
COARSE, FINE = 1, 3

BASE = (
    "cl_khr_global_int32_base_atomics cl_khr_global_int32_extended_atomics "
    "cl_khr_local_int32_base_atomics cl_khr_local_int32_extended_atomics "
    "cl_khr_byte_addressable_store"
)
ATOMICS = f"{BASE} cl_khr_int64_base_atomics cl_khr_int64_extended_atomics"
# Graphics of Intel, from Gen 9 on.
NEO = (
    f"{BASE} cl_khr_fp16 cl_khr_icd cl_khr_subgroups cl_intel_subgroups "
    "cl_intel_required_subgroup_size cl_intel_subgroups_short cl_khr_spir cl_khr_il_program "
    "cl_khr_create_command_queue cl_khr_priority_hints cl_khr_throttle_hints "
    "cl_khr_subgroup_extended_types cl_khr_subgroup_non_uniform_vote cl_khr_subgroup_ballot "
    "cl_khr_subgroup_non_uniform_arithmetic cl_khr_subgroup_shuffle "
    "cl_khr_subgroup_shuffle_relative cl_khr_subgroup_clustered_reduce "
    "cl_intel_device_attribute_query cl_khr_suggested_local_work_size "
    "cl_intel_split_work_group_barrier cl_intel_unified_shared_memory"
)
# Graphics of AMD, by ROCm.
ROCM = (
    f"cl_khr_fp64 {ATOMICS} cl_khr_fp16 cl_amd_device_attribute_query cl_amd_media_ops "
    "cl_amd_media_ops2 cl_khr_subgroups cl_amd_copy_buffer_p2p cl_amd_assembly_program"
)


@dataclass(frozen=True)
class Limits:
    """What a device tells; a field is a variable LIMITS_… of opencl_limits.c."""

    platform: str
    vendor: str
    name: str
    version: str
    c_version: str
    driver: str
    extensions: str
    compute_units: int
    work_group: int
    local_memory: int
    memory: int
    allocation: int
    cache: int
    unified: bool
    type: str = "gpu"
    profile: str = "FULL_PROFILE"
    parameters: int = 1024
    alignment: int = 1024  # of buffers, in bits
    address_bits: int = 64
    float_width: int = 1
    svm: int | None = None  # None: the driver knows no such number
    sub_groups: tuple[int, ...] | None = None  # that a kernel may require
    images: bool = True
    little_endian: bool = True
    available: bool = True
    compiler: bool = True

    def variables(self):
        """The environment of a process that finds this device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["type"] = {"cpu": 2, "gpu": 4, "accelerator": 8}[self.type]
        values["work_items"] = (self.work_group,) * 3
        texts = {
            name: " ".join(map(str, value)) if isinstance(value, tuple)
            else str(int(value) if isinstance(value, bool) else value)
            for name, value in values.items() if value is not None
        }  # fmt: skip
        return {f"LIMITS_{name.upper()}": text for name, text in texts.items()}


DEVICES = {
    # OpenCL 1.2's least for a device of the embedded profile, with the arguments of the full one.
    "the least": Limits(
        platform="OpenCL's least",
        vendor="nobody",
        name="the least device",
        version="OpenCL 1.2 ",
        c_version="OpenCL C 1.2 ",
        driver="1.0",
        extensions=BASE,
        compute_units=1,
        work_group=1,
        local_memory=1 * KIB,
        memory=32 * MIB,
        allocation=1 * MIB,
        cache=0,
        unified=False,
        profile="EMBEDDED_PROFILE",
        images=False,
    ),
    # Groups, units, images and memory: VC4CL 0.4.65 and 0.4.9999 on the VideoCore IV. There is no
    # such driver for the VideoCore VI. Bytes of arguments: clvk, below; VC4CL passes 256.
    "VideoCore VI": Limits(
        platform="OpenCL for the Raspberry Pi VideoCore VI GPU",
        vendor="Broadcom",
        name="VideoCore VI GPU",
        version="OpenCL 1.2 VC4CL 0.4.9999",
        c_version="OpenCL C 1.2 ",
        driver="0.4.9999",
        extensions=f"{BASE} cl_nv_pragma_unroll cl_arm_get_core_id",
        compute_units=1,
        work_group=12,
        local_memory=16 * MIB,  # all memory
        memory=16 * MIB,
        allocation=16 * MIB,
        cache=32 * KIB,
        unified=True,
        alignment=512,
        address_bits=32,
        float_width=16,
        images=False,
    ),
    # clvk on Mesa's Vulkan driver v3dv, on a Raspberry Pi 4. Groups: v3dv's source.
    "V3D 4.2": Limits(
        platform="clvk",
        vendor="nobody",
        name="V3D 4.2",
        version="OpenCL 3.0 CLVK on Vulkan v1.2.230 driver 92680291",
        c_version="OpenCL C 1.2 CLVK on Vulkan v1.2.230 driver 92680291",
        driver="3.0 CLVK on Vulkan v1.2.230 driver 92680291",
        extensions=f"{BASE} cl_khr_extended_versioning cl_khr_create_command_queue "
        "cl_khr_il_program",
        compute_units=1,
        work_group=256,
        local_memory=16 * KIB,
        memory=512 * MIB,
        allocation=128 * MIB,
        cache=0,
        unified=True,
        address_bits=32,
        svm=0,
    ),
    # ARM's driver r54p1 on a Pixel 6, by a probe that lists group, allocation and sub-groups; other
    # numbers by r38p1 on a Pixel 7. [Memory: a Pixel 7's.]
    "Mali-G78": Limits(
        platform="ARM Platform",
        vendor="ARM",
        name="Mali-G78 r0p0",
        version="OpenCL 3.0 v1.r54p1-12eac0.3979a5abbd708e71c87fdb7af36852c5",
        c_version="OpenCL C 1.2 v1.r54p1-12eac0.3979a5abbd708e71c87fdb7af36852c5",
        driver="3.0",
        extensions=f"{ATOMICS} cl_khr_fp16 cl_khr_icd cl_khr_subgroups "
        "cl_khr_subgroup_extended_types cl_khr_subgroup_non_uniform_vote cl_khr_subgroup_ballot "
        "cl_khr_subgroup_non_uniform_arithmetic cl_khr_subgroup_shuffle "
        "cl_khr_subgroup_shuffle_relative cl_khr_subgroup_clustered_reduce "
        "cl_khr_create_command_queue cl_khr_il_program cl_arm_core_id cl_arm_printf "
        "cl_arm_non_uniform_work_group_size cl_arm_import_memory cl_arm_integer_dot_product_int8 "
        "cl_arm_scheduling_controls",
        compute_units=20,
        work_group=512,
        local_memory=32 * KIB,
        memory=7 * GIB,
        allocation=4294443024,
        cache=2 * MIB,
        unified=True,
        svm=COARSE,
    ),
    # Qualcomm's driver, compiler E031.45.02.06. Widths and extensions: the Adreno 740. [Units,
    # memory, group and alignment: the Adreno 750.]
    "Adreno 740": Limits(
        platform="QUALCOMM Snapdragon(TM)",
        vendor="QUALCOMM",
        name="QUALCOMM Adreno(TM) 740",
        version="OpenCL 3.0 Adreno(TM) 740",
        c_version="OpenCL C 3.0 Adreno(TM) 740",
        driver="OpenCL 3.0 QUALCOMM build: commit unknown Compiler E031.45.02.06",
        extensions=f"{BASE} cl_khr_fp16 cl_khr_subgroups cl_qcom_reqd_sub_group_size "
        "cl_qcom_subgroup_shuffle cl_qcom_vector_image_ops cl_qcom_onchip_global_memory "
        "cl_qcom_large_buffer",
        compute_units=6,
        work_group=1024,
        local_memory=32 * KIB,
        memory=5814714368,
        allocation=1 * GIB,
        cache=1 * MIB,
        unified=True,
        svm=FINE,
    ),
    # NEO 21.24 on a UHD Graphics of Comet Lake, which has the units of the UHD 630, and NEO 22.43
    # on later ones. Allocation, alignment and cache: NEO on the HD 530. [Memory: of a
    # machine with 16 GB.]
    "UHD 630": Limits(
        platform="Intel(R) OpenCL HD Graphics",
        vendor="Intel(R) Corporation",
        name="Intel(R) UHD Graphics 630 [0x3e92]",
        version="OpenCL 3.0 NEO ",
        c_version="OpenCL C 1.2 ",
        driver="22.43.24595",
        extensions=f"{NEO} cl_khr_fp64 {ATOMICS}",
        compute_units=24,
        work_group=256,
        local_memory=64 * KIB,
        memory=13 * GIB,
        allocation=4294959104,
        cache=512 * KIB,
        unified=True,
        parameters=2048,
        svm=COARSE,
        sub_groups=(8, 16, 32),
    ),
    # NEO 22.49.25018 on an A770 of 16 GB; group sizes and widths: NEO 31.0.101 on an A750. [Units:
    # 16 for each of its 32 cores. Memory: 16 GB, less what the driver keeps.]
    "Arc A770": Limits(
        platform="Intel(R) OpenCL HD Graphics",
        vendor="Intel(R) Corporation",
        name="Intel(R) Arc(TM) A770 Graphics",
        version="OpenCL 3.0 NEO ",
        c_version="OpenCL C 1.2 ",
        driver="22.49.25018.24",
        extensions=f"{NEO} {ATOMICS}",
        compute_units=512,
        work_group=1024,
        local_memory=64 * KIB,
        memory=16225243136,
        allocation=4294959104,
        cache=16 * MIB,
        unified=False,
        parameters=2048,
        svm=COARSE,
        sub_groups=(8, 16, 32),
    ),
    # ROCm's driver 3592 and later: group, widths and alignment on gfx1032 and gfx1012, units by
    # pairs, as on these; memory: rocminfo on the RX 7900 XTX, of which 85 % are an allocation;
    # local memory: the maker's list.
    "RX 7900 XTX": Limits(
        platform="AMD Accelerated Parallel Processing",
        vendor="Advanced Micro Devices, Inc.",
        name="gfx1100",
        version="OpenCL 2.0 ",
        c_version="OpenCL C 2.0 ",
        driver="3592.0 (HSA1.1,LC)",
        extensions=ROCM,
        compute_units=48,
        work_group=256,
        local_memory=64 * KIB,
        memory=25149440 * KIB,
        allocation=25149440 * KIB // 100 * 85,
        cache=32 * KIB,
        unified=False,
        svm=FINE,
    ),
    # ROCm's driver 2574 on a Vega 64, which still says OpenCL 1.2.
    "Vega 64": Limits(
        platform="AMD Accelerated Parallel Processing",
        vendor="Advanced Micro Devices, Inc.",
        name="gfx900",
        version="OpenCL 1.2 ",
        c_version="OpenCL C 2.0 ",
        driver="2574.0 (HSA1.1,LC)",
        extensions=ROCM,
        compute_units=64,
        work_group=256,
        local_memory=64 * KIB,
        memory=8573157376,
        allocation=7287183769,
        cache=16 * KIB,
        unified=False,
        svm=FINE,
    ),
    # Apple's driver 1.2 1.0 of macOS 11 to 15. Group: on an M3. [Memory: an M1 of 8 GB gives a GPU
    # two thirds. Local memory: Metal's. Arguments: Apple's driver for CPUs. Alignment: the largest
    # of other drivers, a page.]
    "Apple M1": Limits(
        platform="Apple",
        vendor="Apple",
        name="Apple M1",
        version="OpenCL 1.2 ",
        c_version="OpenCL C 1.2 ",
        driver="1.2 1.0",
        extensions="cl_APPLE_SetMemObjectDestructor cl_APPLE_ContextLoggingFunctions "
        f"cl_APPLE_clut cl_APPLE_query_kernel_names {BASE}",
        compute_units=8,
        work_group=256,
        local_memory=32 * KIB,
        memory=5726633984,
        allocation=1 * GIB,
        cache=0,
        unified=True,
        parameters=4096,
        alignment=32768,
    ),
}

VIDEOCORE = DEVICES["VideoCore VI"]
# Devices that clattn passes over, and a part of its reason.
UNUSABLE = {
    "takes too few bytes of kernel arguments: 256; expected 1024 or more": replace(
        VIDEOCORE,
        name="VideoCore IV GPU",
        profile="EMBEDDED_PROFILE",
        parameters=256,
    ),
    "is big-endian": replace(VIDEOCORE, little_endian=False),
    "has no compiler": replace(VIDEOCORE, compiler=False),
    "is not available": replace(VIDEOCORE, available=False),
}
