/* SPDX-License-Identifier: MIT */
#include "opencl/query.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/platform.h"
#include "base/processor.h"
#include "opencl/device.h"
#include "opencl/modes.h"

/* Devices found so far. */
typedef struct {
    ca_device *devices;
    int count;
    cl_int code; /* of clGetDeviceIDs, for the last platform without devices */
} device_list;

/* Copy a text without spaces at its ends; "" if the driver does not say. */
static void
query_text(const ca_device *device, cl_device_info what, char *text, size_t size)
{
    char full[1024] = "";
    if (device->cl->clGetDeviceInfo(device->id, what, sizeof full, full, NULL) != CL_SUCCESS) {
        full[0] = '\0';
    }
    full[sizeof full - 1] = '\0';
    const char *start = full + strspn(full, " "); /* Intel pads CPU names */
    size_t length = strlen(start);
    while (length > 0 && start[length - 1] == ' ') {
        length--;
    }
    (void)snprintf(text, size, "%.*s", (int)length, start);
}

/* Mark the device as unusable; the reason is `reason` and `detail`. */
static void
device_unusable(ca_device *device, const char *reason, const char *detail)
{
    ca_error_set(&device->failure, CA_ERROR_DEVICE, "device '%s' %s%s", device->info.name, reason,
                 detail);
    atomic_store(&device->state, CA_DEVICE_UNUSABLE);
}

/* Set *number to a cl_ulong, cl_uint, size_t or cl_bool. False, and 0, if the driver does not say. */
static bool
says_number(const ca_device *device, cl_device_info what, int64_t *number)
{
    unsigned char raw[8] = {0};
    size_t size = 0;
    *number = 0;
    if (device->cl->clGetDeviceInfo(device->id, what, sizeof raw, raw, &size) != CL_SUCCESS) {
        return false;
    }
    if (size == sizeof(uint32_t)) {
        uint32_t narrow;
        memcpy(&narrow, raw, sizeof narrow);
        *number = (int64_t)narrow;
        return true;
    }
    uint64_t wide;
    memcpy(&wide, raw, sizeof wide);
    *number = wide > INT64_MAX ? INT64_MAX : (int64_t)wide;
    return true;
}

/* Returns the number; 0 if the driver does not say. */
static int64_t
query_number(const ca_device *device, cl_device_info what)
{
    int64_t number;
    (void)says_number(device, what, &number);
    return number;
}

/* Returns a number without which the device cannot be used. */
static int64_t
query_needed(ca_device *device, cl_device_info what, const char *name)
{
    int64_t number;
    if (!says_number(device, what, &number)) {
        device_unusable(device, "cannot be used: clGetDeviceInfo does not say its ", name);
    }
    return number;
}

#define QUERY_NEEDED(device, what) query_needed(device, what, #what)

static ca_device_type
query_type(ca_device *device)
{
    int64_t bits = QUERY_NEEDED(device, CL_DEVICE_TYPE);
    if (bits & CL_DEVICE_TYPE_GPU) {
        return CA_DEVICE_GPU;
    }
    return bits & CL_DEVICE_TYPE_CPU ? CA_DEVICE_CPU : CA_DEVICE_ACCELERATOR;
}

/* True if the device's list of extensions has this name as a whole word. */
static bool
query_extension(const ca_device *device, const char *name)
{
    const ca_cl *cl = device->cl;
    size_t size = 0;
    bool found = false;
    if (cl->clGetDeviceInfo(device->id, CL_DEVICE_EXTENSIONS, 0, NULL, &size) != CL_SUCCESS) {
        return false;
    }
    char *list = calloc(size + 1, 1);
    if (list == NULL) {
        return false;
    }
    if (cl->clGetDeviceInfo(device->id, CL_DEVICE_EXTENSIONS, size, list, NULL) == CL_SUCCESS) {
        size_t length = strlen(name);
        for (const char *at = strstr(list, name); at != NULL && !found;
             at = strstr(at + length, name)) {
            found = (at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0');
        }
    }
    free(list);
    return found;
}

/* The first number of a version such as "OpenCL 3.0 CUDA"; 0 for another text. */
static long
major_of(const char *version)
{
    static const char start[] = "OpenCL ";
    size_t length = sizeof start - 1;
    return strncmp(version, start, length) == 0 ? strtol(version + length, NULL, 10) : 0;
}

/* A driver for OpenCL 1.2 may crash in newer functions, so the version comes first. */
static bool
query_system_svm(const ca_device *device)
{
    return major_of(device->info.version) >= 2 && device->cl->clSetKernelArgSVMPointer != NULL &&
           (query_number(device, CL_DEVICE_SVM_CAPABILITIES) & CL_DEVICE_SVM_FINE_GRAIN_SYSTEM) !=
               0;
}

/* The headers that define these include headers that some packages lack. */
#define CA_CL_SUB_GROUP_SIZES_INTEL 0x4108
#define CA_CL_CAPABILITY_MAJOR_NV   0x4000
#define CA_CL_CAPABILITY_MINOR_NV   0x4001
#define CA_CL_WAVEFRONT_WIDTH_AMD   0x4043

/* Returns the smallest size of sub-groups that a kernel may require, 0 if the driver lists none. Each
   size is a power of 2. */
static int64_t
query_smallest_sub_group(const ca_device *device)
{
    size_t sizes[16];
    size_t bytes = 0;
    int64_t sum = 0;
    bool listed = query_extension(device, "cl_intel_required_subgroup_size") &&
                  device->cl->clGetDeviceInfo(device->id, CA_CL_SUB_GROUP_SIZES_INTEL, sizeof sizes,
                                              sizes, &bytes) == CL_SUCCESS;
    for (size_t n = 0; listed && n < bytes / sizeof sizes[0]; n++) {
        sum += (int64_t)sizes[n];
    }
    return sum & -sum;
}

#define MANY_REGISTERS 256
#define FEW_REGISTERS  128
#define WAVE_REGISTERS 8192

/* Returns how many registers a work-item may keep. NVIDIA's threads have 255. The waves of a SIMD
   of AMD's share its registers; two waves of 64 work-items, or four of 32, have 8192 each. A thread
   of Intel's GPUs has 4 KiB for 8 work-items or 8 KiB for 16, which are the smallest sub-groups. A
   device that says nothing counts as one of these. CPUs keep what does not fit in a cache. */
static int64_t
query_registers(const ca_device *device, const ca_device_info *info)
{
    int64_t wave = 0;
    if (query_extension(device, "cl_amd_device_attribute_query")) {
        wave = query_number(device, CA_CL_WAVEFRONT_WIDTH_AMD);
    }
    bool many = info->type == CA_DEVICE_CPU || info->nvidia_capability > 0 ||
                (wave > 0 && wave <= WAVE_REGISTERS / MANY_REGISTERS);
    return many ? MANY_REGISTERS : FEW_REGISTERS;
}

/* PTX has shuffles from capability 7.0 on, matrix units and asynchronous copies from 8.0
   on. The compiler for 8.0 spills registers where the one for 9.0 does not. A unit
   of capabilities 9.0 to 11.0 has 228 KiB of local memory. Units of other capabilities have at
   most 164 KiB. Products of groups of warps are instructions of 9.0 alone. */
static void
query_nvidia(const ca_device *device, ca_device_info *info)
{
    if (query_extension(device, "cl_nv_device_attribute_query")) {
        info->nvidia_capability = 10 * query_number(device, CA_CL_CAPABILITY_MAJOR_NV) +
                                  query_number(device, CA_CL_CAPABILITY_MINOR_NV);
        info->warp_shuffles = info->nvidia_capability >= 70;
        info->float16_matrices = info->nvidia_capability >= 80;
        info->bfloat16_matrices = info->float16_matrices;
        info->group_matrices = info->nvidia_capability == 90;
        info->ample_registers = info->nvidia_capability >= 90;
        info->ample_local_memory = info->nvidia_capability >= 90 && info->nvidia_capability < 120;
    }
}

/* Choose the memory mode: the best, or the override. False if the device lacks it. */
static bool
choose_memory(ca_device *device, const char *override)
{
    ca_memory_mode mode = CA_MEMORY_SVM;
    device->memory_is_given =
        override != NULL && override[0] != '\0' && ca_memory_find(override, &mode);
    ca_device_set_memory(device, mode);
    return ca_device_has_memory(device, device->info.memory);
}

/* True for the drivers that clattn has run on, of these or later versions, and for NVIDIA's. What others
   have not done yet is tried in another process first. */
static bool
is_known(const ca_device_info *info)
{
    static const struct {
        const char *platform;
        long version;
    } known[] = {
        {"Intel(R) OpenCL", 0}, /* for CPUs; the platforms of Intel's GPUs have longer names */
        {"Portable Computing Language", 3},
        {"Oclgrind", 0},
    };
    bool found = info->nvidia_capability > 0;
    for (size_t n = 0; n < sizeof known / sizeof known[0]; n++) {
        found = found || (strcmp(info->platform, known[n].platform) == 0 &&
                          strtol(info->driver_version, NULL, 10) >= known[n].version);
    }
    return found;
}

/* Fill in everything about a device whose `cl`, `platform` and `id` are set. */
static void
query_device(ca_device *device, const char *memory_override)
{
    ca_device_info *info = &device->info;
    query_text(device, CL_DEVICE_NAME, info->name, sizeof info->name);
    query_text(device, CL_DEVICE_VENDOR, info->vendor, sizeof info->vendor);
    query_text(device, CL_DEVICE_VERSION, info->version, sizeof info->version);
    query_text(device, CL_DRIVER_VERSION, info->driver_version, sizeof info->driver_version);
    query_text(device, CL_DEVICE_OPENCL_C_VERSION, info->c_version, sizeof info->c_version);
    info->type = query_type(device);
    info->compute_units = QUERY_NEEDED(device, CL_DEVICE_MAX_COMPUTE_UNITS);
    info->global_memory = QUERY_NEEDED(device, CL_DEVICE_GLOBAL_MEM_SIZE);
    info->max_allocation = QUERY_NEEDED(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE);
    info->cache = query_number(device, CL_DEVICE_GLOBAL_MEM_CACHE_SIZE);
    info->first_cache = info->type == CA_DEVICE_CPU ? ca_first_cache() : 0;
    info->second_cache = info->type == CA_DEVICE_CPU ? ca_second_cache() : 0;
    info->local_memory = query_number(device, CL_DEVICE_LOCAL_MEM_SIZE);
    info->max_work_group = QUERY_NEEDED(device, CL_DEVICE_MAX_WORK_GROUP_SIZE);
    info->max_parameter_size = QUERY_NEEDED(device, CL_DEVICE_MAX_PARAMETER_SIZE);
    info->float_width = query_number(device, CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT);
    info->items_are_lanes = info->type != CA_DEVICE_CPU || info->float_width == 1;
    info->smallest_sub_group = info->type != CA_DEVICE_CPU ? query_smallest_sub_group(device) : 0;
    query_nvidia(device, info);
    info->registers = query_registers(device, info);
    info->float64 = query_extension(device, "cl_khr_fp64");
    info->float16 = query_extension(device, "cl_khr_fp16");
    device->system_svm = query_system_svm(device);
    device->shares_memory = query_number(device, CL_DEVICE_HOST_UNIFIED_MEMORY) != 0;
    device->local_execution = query_extension(device, "cl_intel_exec_by_local_thread");
    device->is_host = info->type == CA_DEVICE_CPU && device->shares_memory;
    info->fast_pairs = device->is_host && ca_processor_has_fast_pairs();
    bool available = QUERY_NEEDED(device, CL_DEVICE_AVAILABLE) != 0;
    bool compiler = QUERY_NEEDED(device, CL_DEVICE_COMPILER_AVAILABLE) != 0;
    bool little = QUERY_NEEDED(device, CL_DEVICE_ENDIAN_LITTLE) != 0;
    bool chosen = choose_memory(device, memory_override);
    if (atomic_load(&device->state) == CA_DEVICE_UNUSABLE) {
        /* the reason is known */
    } else if (!available) {
        device_unusable(device, "is not available", "");
    } else if (!compiler) {
        device_unusable(device, "has no compiler", "");
    } else if (!little) {
        device_unusable(device, "is big-endian", "");
    } else if (info->max_parameter_size < CA_PARAMETER_BYTES) {
        char bytes[64];
        (void)snprintf(bytes, sizeof bytes, "%" PRId64 "; expected %d or more",
                       info->max_parameter_size, CA_PARAMETER_BYTES);
        device_unusable(device, "takes too few bytes of kernel arguments: ", bytes);
    } else if (!chosen) {
        device_unusable(device, "lacks the memory mode asked for: ", memory_override);
    }
    info->is_known = is_known(info);
}

/* Append the devices of a platform to the list. */
static ca_status
query_platform(const ca_cl *cl, cl_platform_id platform, const char *memory_override,
               device_list *list, ca_error *error)
{
    ca_status status = CA_OK;
    cl_device_id *ids = NULL;
    ca_device *devices = NULL;
    cl_uint count = 0;
    /* Pass over a platform that is broken or has no devices. */
    cl_int code = cl->clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, NULL, &count);
    if (code != CL_SUCCESS || count == 0) {
        list->code = code;
        goto done;
    }
    ids = calloc(count, sizeof *ids);
    devices = realloc(list->devices, ((size_t)list->count + count) * sizeof *devices);
    list->devices = devices != NULL ? devices : list->devices;
    if (ids == NULL || devices == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory to list devices"));
    }
    code = cl->clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, count, ids, NULL);
    if (code != CL_SUCCESS) {
        list->code = code;
        goto done;
    }
    for (cl_uint i = 0; i < count; i++) {
        ca_device *device = &devices[list->count++];
        memset(device, 0, sizeof *device);
        device->cl = cl;
        device->platform = platform;
        device->id = ids[i];
        cl->clGetPlatformInfo(platform, CL_PLATFORM_NAME, sizeof device->info.platform,
                              device->info.platform, NULL);
        device->info.platform[sizeof device->info.platform - 1] = '\0';
        /* PoCL keeps programs itself. It compiles a kernel again when asked for the binary. */
        bool is_pocl = strcmp(device->info.platform, "Portable Computing Language") == 0;
        device->info.keeps_programs = is_pocl;
        device->info.optimises_slowly = is_pocl;
        device->info.wakes_late = is_pocl;
        query_device(device, memory_override);
        /* PoCL 6.0 and earlier versions optimise a kernel when the kernel first runs, even if the
           program was built with -cl-opt-disable. */
        device->info.optimises_later = is_pocl && strtol(device->info.driver_version, NULL, 10) < 7;
    }
done:
    free(ids);
    return status;
}

/* True if `a` is listed before `b`. CPUs are ranked by the best mode they have, not by the
   chosen one, so that an override changes no device's place. */
static bool
device_precedes(const ca_device *a, const ca_device *b)
{
    if (a->info.type != b->info.type) {
        return a->info.type < b->info.type;
    }
    return a->info.type == CA_DEVICE_CPU && a->system_svm && !b->system_svm;
}

/* Insertion sort: stable, and the list is short. */
static void
devices_sort(ca_device *devices, int count)
{
    for (int i = 1; i < count; i++) {
        ca_device moving = devices[i];
        int to = i;
        while (to > 0 && device_precedes(&moving, &devices[to - 1])) {
            devices[to] = devices[to - 1];
            to--;
        }
        devices[to] = moving;
    }
}

ca_status
ca_query_devices(const ca_cl *cl, const char *memory_override, ca_device **devices, int *count,
                 ca_error *error)
{
    ca_status status = CA_OK;
    cl_platform_id *platforms = NULL;
    cl_uint platform_count = 0;
    device_list list = {0};
    cl_int code = cl->clGetPlatformIDs(0, NULL, &platform_count);
    *devices = NULL;
    *count = 0;
    if (code != CL_SUCCESS || platform_count == 0) {
        CA_TRY(ca_error_set(error, CA_ERROR_DEVICE,
                            "the OpenCL loader found no platform (%s), so no driver",
                            ca_cl_error_name(code)));
    }
    platforms = calloc(platform_count, sizeof *platforms);
    if (platforms == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory to list platforms"));
    }
    code = cl->clGetPlatformIDs(platform_count, platforms, NULL);
    if (code != CL_SUCCESS) {
        CA_TRY(ca_error_set(error, CA_ERROR_DEVICE, "clGetPlatformIDs gave %s (%d)",
                            ca_cl_error_name(code), (int)code));
    }
    for (cl_uint i = 0; i < platform_count; i++) {
        CA_TRY(query_platform(cl, platforms[i], memory_override, &list, error));
    }
    if (list.count == 0) {
        CA_TRY(ca_error_set(error, CA_ERROR_DEVICE,
                            "none of %u OpenCL platforms has a device (clGetDeviceIDs gave %s)",
                            (unsigned)platform_count, ca_cl_error_name(list.code)));
    }
    devices_sort(list.devices, list.count);
    for (int n = 0; n < list.count; n++) {
        list.devices[n].index = n;
    }
    *devices = list.devices;
    *count = list.count;
    list.devices = NULL;
done:
    free(platforms);
    free(list.devices);
    return status;
}

ca_status
ca_query_buffer(const ca_device *device, cl_mem buffer, const char *what, ca_buffer_info *info,
                ca_error *error)
{
    cl_mem parent = NULL;
    cl_mem_object_type type = 0;
    cl_context context = NULL;
    cl_mem_flags flags = 0;
    *info = (ca_buffer_info){.whole = buffer};
    const struct {
        cl_mem_info what;
        size_t size;
        void *value;
    } asked[] = {
        {CL_MEM_TYPE, sizeof type, &type},
        {CL_MEM_CONTEXT, sizeof(cl_context), &context},
        {CL_MEM_FLAGS, sizeof flags, &flags},
        {CL_MEM_OFFSET, sizeof info->offset, &info->offset},
        {CL_MEM_ASSOCIATED_MEMOBJECT, sizeof(cl_mem), &parent},
        {CL_MEM_SIZE, sizeof info->bytes, &info->bytes}, /* the last, of the parent */
    };
    ca_status status = CA_OK;
    for (size_t n = 0; n < sizeof asked / sizeof asked[0]; n++) {
        info->whole = parent != NULL ? parent : buffer;
        cl_mem of = asked[n].what == CL_MEM_SIZE ? info->whole : buffer;
        CA_TRY(ca_cl_check(
            device->cl->clGetMemObjectInfo(of, asked[n].what, asked[n].size, asked[n].value, NULL),
            "clGetMemObjectInfo", device->info.name, error));
    }
    if (type != CL_MEM_OBJECT_BUFFER || context != device->context) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "%s lies in %s; expected a buffer of the context of its queue", what,
                            type != CL_MEM_OBJECT_BUFFER ? "an OpenCL image or pipe"
                                                         : "a buffer of another OpenCL context"));
    }
    info->read_only = (flags & CL_MEM_READ_ONLY) != 0;
done:
    return status;
}
