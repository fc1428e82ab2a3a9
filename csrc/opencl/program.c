/* SPDX-License-Identifier: MIT */
#include "opencl/program.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/processor.h"
#include "base/strbuf.h"
#include "opencl/device.h"
#include "opencl/ptx.h"
#include "opencl/sources.h"

/* Returns the embedded source of that name, or NULL. */
static const ca_kernel_source *
source_find(const char *name)
{
    for (size_t i = 0; i < ca_kernel_source_count; i++) {
        if (strcmp(ca_kernel_sources[i].name, name) == 0) {
            return &ca_kernel_sources[i];
        }
    }
    return NULL;
}

/* No fast-math flags: kernels rely on infinities and NaN. */
static void
append_options(ca_strbuf *options, const ca_kernel_spec *spec)
{
    ca_strbuf_append(options, "-cl-std=CL1.2");
    ca_strbuf_append(options, spec->unoptimised ? " -cl-opt-disable" : "");
    for (int i = 0; i < spec->ndefines; i++) {
        ca_strbuf_append(options, " -D%s=%" PRId64, spec->defines[i].name, spec->defines[i].value);
    }
}

/* Append what decides which instructions a binary for a CPU has: those of the processor, and a variable
   that makes Intel's runtime build for another kind of processor. The device's name does not decide,
   because processors with different instructions share a name. */
static void
append_processor(ca_strbuf *text, const ca_device_info *info)
{
    if (info->type != CA_DEVICE_CPU) {
        return;
    }
    const char *kind = getenv("CL_CONFIG_CPU_TARGET_ARCH");
    uint32_t words[CA_PROCESSOR_WORDS];
    ca_processor_describe(words);
    for (int n = 0; n < CA_PROCESSOR_WORDS; n++) {
        ca_strbuf_append(text, "%08" PRIx32 "\n", words[n]);
    }
    ca_strbuf_append(text, "%s\n", kind != NULL ? kind : "");
}

/* A hash of everything that the binary depends on. */
static bool
build_identity(const ca_device *device, const ca_kernel_spec *spec, const char *options,
               const ca_kernel_source *source, ca_hash *identity)
{
    const ca_device_info *info = &device->info;
    ca_strbuf text = {0};
    append_processor(&text, info);
    ca_strbuf_append(&text, "%s\n%s\n%s\n%s\n%s\n%s\n%.*s", info->platform, info->name,
                     info->driver_version, info->version, options,
                     spec->mods != NULL ? spec->mods : "", (int)source->size,
                     (const char *)source->bytes);
    bool ok = !text.failed;
    if (ok) {
        *identity = ca_cache_hash(text.data, text.length);
    }
    ca_strbuf_free(&text);
    return ok;
}

ca_hash
ca_kernels_identity(void)
{
    ca_hash sum = {{0, 0}};
    for (size_t i = 0; i < ca_kernel_source_count; i++) {
        const ca_kernel_source *source = &ca_kernel_sources[i];
        const ca_hash parts[] = {sum, ca_cache_hash(source->bytes, source->size)};
        sum = ca_cache_hash(parts, sizeof parts);
    }
    return sum;
}

bool
ca_kernel_identity(const ca_device *device, const ca_kernel_spec *spec, ca_hash *identity)
{
    ca_strbuf options = {0};
    append_options(&options, spec);
    bool ok = !options.failed &&
              build_identity(device, spec, options.data, source_find(spec->name), identity);
    ca_strbuf_free(&options);
    return ok;
}

/* Append the source with the names and numbers that the compiler's log has for its lines:
   after `#line 7 "file"` comes line 7 of that file. */
static void
append_numbered(ca_strbuf *text, const ca_kernel_source *source)
{
    const char *at = (const char *)source->bytes;
    const char *end = at + source->size;
    int number = 1;
    while (at < end) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        stop = stop != NULL ? stop : end;
        int length = (int)(stop - at);
        char line[128];
        char file[sizeof line];
        (void)snprintf(line, sizeof line, "%.*s", length, at);
        /* The build of clattn has written these lines.
           NOLINTNEXTLINE(*-string-to-number-conversion,cert-err34-c) */
        if (sscanf(line, "#line %d \"%127[^\"]\"", &number, file) == 2) {
            ca_strbuf_append(text, "%s:\n", file);
        } else {
            ca_strbuf_append(text, "%4d  %.*s\n", number++, length, at);
        }
        at = stop + 1;
    }
}

/* Attach the compiler's log and the numbered source to the error. */
static void
attach_log(const ca_device *device, cl_program program, const char *mods,
           const ca_kernel_source *source, ca_error *error)
{
    const ca_cl *cl = device->cl;
    ca_strbuf text = {0};
    size_t size = 0;
    char *log = NULL;
    if (cl->clGetProgramBuildInfo(program, device->id, CL_PROGRAM_BUILD_LOG, 0, NULL, &size) ==
        CL_SUCCESS) {
        log = calloc(size + 1, 1);
    }
    if (log != NULL && cl->clGetProgramBuildInfo(program, device->id, CL_PROGRAM_BUILD_LOG, size,
                                                 log, NULL) == CL_SUCCESS) {
        ca_strbuf_append(&text, "%s\n", log);
    }
    if (mods != NULL) {
        ca_strbuf_append(&text, "MODS:\n%s\n", mods);
    }
    append_numbered(&text, source);
    if (!text.failed && text.data != NULL) {
        ca_error_set_log(error, text.data);
    }
    free(log);
    ca_strbuf_free(&text);
}

/* True if binaries of the kernel are kept on disk. A driver may keep them itself. */
static bool
is_kept(const ca_device *device, const ca_kernel_spec *spec)
{
    return !spec->is_probe && !device->info.keeps_programs && device->cache_folder != NULL;
}

/* Makes a program from its binary. Returns NULL if the driver refuses the binary. */
static cl_program
program_from_binary(const ca_device *device, const unsigned char *binary, size_t size,
                    const char *options)
{
    const ca_cl *cl = device->cl;
    cl_int loaded = CL_SUCCESS;
    cl_int code = CL_SUCCESS;
    cl_program program = cl->clCreateProgramWithBinary(device->context, 1, &device->id, &size,
                                                       &binary, &loaded, &code);
    if (program != NULL &&
        (code != CL_SUCCESS || loaded != CL_SUCCESS ||
         cl->clBuildProgram(program, 1, &device->id, options, NULL, NULL) != CL_SUCCESS)) {
        cl->clReleaseProgram(program);
        program = NULL;
    }
    return program;
}

/* Make the program from a binary of the cache; NULL if it has to be built from source. */
static cl_program
program_from_cache(ca_device *device, const ca_kernel_spec *spec, const char *options,
                   ca_hash identity)
{
    unsigned char *binary = NULL;
    size_t size = 0;
    cl_program program = NULL;
    if (is_kept(device, spec) &&
        ca_cache_read(device->cache_folder, spec->name, identity, &binary, &size)) {
        program = program_from_binary(device, binary, size, options);
    }
    free(binary);
    return program;
}

/* Returns the program's one binary, which the caller frees, or NULL. */
static unsigned char *
binary_of(const ca_device *device, cl_program program, size_t *size)
{
    const ca_cl *cl = device->cl;
    *size = 0; /* of the one binary: the context has one device */
    if (cl->clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof *size, size, NULL) !=
            CL_SUCCESS ||
        *size == 0) {
        return NULL;
    }
    unsigned char *binary = malloc(*size);
    if (binary != NULL &&
        cl->clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof(unsigned char *), &binary,
                             NULL) != CL_SUCCESS) {
        free(binary);
        binary = NULL;
    }
    return binary;
}

static void
program_to_cache(const ca_device *device, const ca_kernel_spec *spec, ca_hash identity,
                 cl_program program)
{
    size_t size = 0;
    unsigned char *binary = is_kept(device, spec) ? binary_of(device, program, &size) : NULL;
    if (binary != NULL) {
        ca_cache_write(device->cache_folder, spec->name, identity, binary, size);
    }
    free(binary);
}

/* Returns what clBuildProgram gives, and counts the build. */
static cl_int
program_compile(ca_device *device, cl_program program, const char *options)
{
    double start = ca_seconds();
    cl_int code = device->cl->clBuildProgram(program, 1, &device->id, options, NULL, NULL);
    double seconds = ca_seconds() - start;
    ca_mutex_lock(&device->lock);
    device->built.programs += code == CL_SUCCESS;
    device->built.seconds += seconds;
    ca_mutex_unlock(&device->lock);
    return code;
}

/* Build the program again for compute capability 9.0a, from its binary, in the place of the first one. */
static ca_status
program_retarget(const ca_device *device, const char *name, const char *options,
                 cl_program *program, ca_error *error)
{
    size_t size = 0;
    unsigned char *binary = binary_of(device, *program, &size);
    ca_strbuf ptx = {0};
    cl_program retargeted = NULL;
    if (binary != NULL) {
        ca_ptx_retarget((const char *)binary, size, &ptx);
        if (!ptx.failed) {
            retargeted =
                program_from_binary(device, (const unsigned char *)ptx.data, ptx.length, options);
        }
    }
    ca_strbuf_free(&ptx);
    free(binary);
    if (retargeted == NULL) {
        return ca_error_set(error, CA_ERROR_KERNEL,
                            "kernel '%s' does not build on device '%s' for compute capability 9.0a",
                            name, device->info.name);
    }
    device->cl->clReleaseProgram(*program);
    *program = retargeted;
    return CA_OK;
}

/* The text of spec->mods as a macro's definition, a line of a program. */
static void
append_mods(ca_strbuf *text, const char *mods)
{
    ca_strbuf_append(text, "#define MODS ");
    for (const char *at = mods; *at != '\0';) {
        size_t length = strcspn(at, "\n");
        ca_strbuf_append(text, "%.*s \\\n", (int)length, at);
        at += length + (at[length] == '\n');
    }
    ca_strbuf_append(text, "\n");
}

static ca_status
program_from_source(ca_device *device, const ca_kernel_spec *spec, const ca_kernel_source *source,
                    const char *options, cl_program *program, ca_error *error)
{
    ca_status status = CA_OK;
    const ca_cl *cl = device->cl;
    ca_strbuf mods = {0};
    cl_int code = CL_SUCCESS;
    const char *texts[2];
    size_t sizes[2];
    cl_uint count = 0;
    if (spec->mods != NULL) {
        append_mods(&mods, spec->mods);
        texts[count] = mods.data;
        sizes[count++] = mods.length;
    }
    if (mods.failed) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory to build kernel '%s'", spec->name));
    }
    texts[count] = (const char *)source->bytes;
    sizes[count++] = source->size;
    *program = cl->clCreateProgramWithSource(device->context, count, texts, sizes, &code);
    CA_TRY(ca_cl_check(code, "clCreateProgramWithSource", device->info.name, error));
    code = program_compile(device, *program, options);
    if (code != CL_SUCCESS) {
        attach_log(device, *program, spec->mods, source, error);
        CA_TRY(ca_error_set(
            error, CA_ERROR_KERNEL,
            "kernel '%s' does not build on device '%s' with '%s': clBuildProgram gave %s (%d)",
            source->name, device->info.name, options, ca_cl_error_name(code), (int)code));
    }
    if (spec->for_90a) {
        CA_TRY(program_retarget(device, source->name, options, program, error));
    }
done:
    ca_strbuf_free(&mods);
    return status;
}

/* Finds the kernel in memory, or returns NULL. */
static ca_kernel *
kernel_find(ca_device *device, const ca_kernel_spec *spec, uint64_t hash)
{
    ca_mutex_lock(&device->lock);
    ca_kernel *kernel = ca_kernel_table_find(&device->kernels, spec, hash);
    ca_mutex_unlock(&device->lock);
    return kernel;
}

bool
ca_kernel_is_built(ca_device *device, const ca_kernel_spec *spec)
{
    return kernel_find(device, spec, ca_kernel_spec_hash(spec)) != NULL;
}

/* Make the kernel's handle and read its limits. */
static cl_int
kernel_open(const ca_device *device, ca_kernel *kernel)
{
    const ca_cl *cl = device->cl;
    cl_int code = CL_SUCCESS;
    kernel->handle = cl->clCreateKernel(kernel->program, kernel->spec.name, &code);
    if (code != CL_SUCCESS) {
        kernel->handle = NULL;
        return code;
    }
    ca_kernel_limits *limits = &kernel->limits;
    code = cl->clGetKernelWorkGroupInfo(kernel->handle, device->id, CL_KERNEL_LOCAL_MEM_SIZE,
                                        sizeof limits->local_memory, &limits->local_memory, NULL);
    if (code != CL_SUCCESS) { /* launching tells */
        limits->local_memory = 0;
    }
    return cl->clGetKernelWorkGroupInfo(kernel->handle, device->id, CL_KERNEL_WORK_GROUP_SIZE,
                                        sizeof limits->work_group, &limits->work_group, NULL);
}

const ca_kernel_limits *
ca_kernel_get_limits(const ca_kernel *kernel)
{
    return &kernel->limits;
}

bool
ca_kernel_tighten(const ca_device *device, const ca_kernel *kernel, size_t local_size,
                  ca_plan_limits *limits)
{
    const int64_t most = (int64_t)kernel->limits.work_group;
    const double available = (double)device->info.local_memory;
    const double taken = (double)kernel->limits.local_memory;
    const bool is_large = local_size > kernel->limits.work_group && most < limits->group;
    const bool takes_more = taken > available && limits->local_memory > 0;
    if (is_large) {
        limits->group = most;
    }
    if (takes_more) {
        limits->local_memory = (int64_t)((double)limits->local_memory * available / taken);
    }
    return is_large || takes_more;
}

/* Build the kernel, from the cache on disk or from source. */
static ca_status
kernel_build(ca_device *device, const ca_kernel_source *source, ca_kernel *kernel, ca_error *error)
{
    ca_status status = CA_OK;
    const char *name = kernel->spec.name;
    ca_hash identity = {0};
    ca_strbuf options = {0};
    append_options(&options, &kernel->spec);
    if (options.failed || !build_identity(device, &kernel->spec, options.data, source, &identity)) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory to build kernel '%s'", name));
    }
    kernel->program = program_from_cache(device, &kernel->spec, options.data, identity);
    if (kernel->program != NULL) {
        if (kernel_open(device, kernel) == CL_SUCCESS) {
            goto done;
        }
        if (kernel->handle != NULL) {
            device->cl->clReleaseKernel(kernel->handle);
            kernel->handle = NULL;
        }
        device->cl->clReleaseProgram(kernel->program);
        kernel->program = NULL;
    }
    CA_TRY(
        program_from_source(device, &kernel->spec, source, options.data, &kernel->program, error));
    cl_int code = kernel_open(device, kernel);
    if (code != CL_SUCCESS) {
        char call[128];
        (void)snprintf(call, sizeof call, "clCreateKernel of '%s'", name);
        CA_TRY(ca_cl_check_kernel(code, call, device->info.name, error));
    }
    program_to_cache(device, &kernel->spec, identity, kernel->program);
done:
    ca_strbuf_free(&options);
    return status;
}

ca_status
ca_kernel_get_locked(ca_device *device, const ca_kernel_spec *spec, ca_kernel **kernel,
                     ca_error *error)
{
    ca_status status = CA_OK;
    ca_kernel *built = NULL;
    uint64_t hash = ca_kernel_spec_hash(spec);
    const ca_kernel_source *source = source_find(spec->name);
    *kernel = kernel_find(device, spec, hash);
    if (*kernel != NULL) {
        goto done; /* another thread built it while this one waited */
    }
    if (source == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_DEVICE, "there is no kernel '%s'", spec->name));
    }
    built = calloc(1, sizeof *built);
    if (built == NULL) {
        CA_TRY(ca_error_set(error, CA_ERROR_MEMORY, "no memory to build kernel '%s'", spec->name));
    }
    built->spec = *spec;
    built->hash = hash;
    CA_TRY(kernel_build(device, source, built, error));
    built->spec.mods = NULL; /* the caller's */
    ca_mutex_lock(&device->lock);
    ca_kernel_table_insert(&device->kernels, built);
    *kernel = built;
    built = NULL;
    ca_mutex_unlock(&device->lock);
done:
    ca_kernel_free(device->cl, built);
    return status;
}

ca_status
ca_kernel_get(ca_device *device, const ca_kernel_spec *spec, ca_kernel **kernel, ca_error *error)
{
    ca_status status = CA_OK;
    if (spec->ndefines > CA_MAX_DEFINES) {
        return ca_error_set(error, CA_ERROR_DEVICE,
                            "kernel '%s' has %d macros; expected at most %d", spec->name,
                            spec->ndefines, CA_MAX_DEFINES);
    }
    *kernel = kernel_find(device, spec, ca_kernel_spec_hash(spec));
    if (*kernel == NULL) {
        ca_mutex_lock(&device->build_lock);
        status = ca_kernel_get_locked(device, spec, kernel, error);
        ca_mutex_unlock(&device->build_lock);
        /* The driver's compiler has taken long, and knows no signals. */
        status = status == CA_OK ? ca_error_ask(error) : status;
    }
    return status;
}

ca_build_stats
ca_device_built(ca_device *device)
{
    ca_mutex_lock(&device->lock);
    ca_build_stats built = device->built;
    ca_mutex_unlock(&device->lock);
    return built;
}
