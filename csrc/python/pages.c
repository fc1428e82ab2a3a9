/* SPDX-License-Identifier: MIT
 *
 * The functions by which clattn.PagedKVCache writes to its pages. Python has checked the user's arguments;
 * what is checked here keeps a wrong call from memory that is not the pages'.
 */
#include "pages/rows.h"

#include "opencl/runtime.h"
#include "python/call.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/scalars.h"
#include "python/tensor.h"

/* Reads a C-contiguous Tensor of at least `least` dimensions. */
static int
parse_pages(ca_py_call *call, PyObject *object, const char *name, int least, ca_tensor *pages)
{
    if (ca_py_call_array(call, object, name, CA_TAKES_NUMBERS, pages) < 0) {
        return -1;
    }
    return pages->block != NULL && pages->ndim >= least && ca_tensor_fills_extent(pages)
               ? 0
               : ca_py_raise(PyExc_ValueError, "%s are no Tensor of pages", name);
}

/* Reads scales or offsets, which a cache may lack: None. */
static int
parse_scales(ca_py_call *call, PyObject *object, const char *name, ca_tensor *scales)
{
    ca_tensor_set_absent(scales);
    return object == Py_None ? 0 : parse_pages(call, object, name, 1, scales);
}

/* Reads numbers of pages or places, each below `limit`. */
static int
parse_places(ca_py_call *call, PyObject *object, const char *name, int64_t limit,
             ca_tensor *numbers)
{
    if (ca_py_call_int64s(call, object, name, numbers) < 0) {
        return -1;
    }
    const int64_t *places = numbers->data;
    for (int64_t n = 0; n < numbers->shape[0]; n++) {
        if (places[n] < 0 || places[n] >= limit) {
            return ca_py_raise(PyExc_ValueError, "%s[%lld] is %lld; expected 0 to %lld", name,
                               (long long)n, (long long)places[n], (long long)(limit - 1));
        }
    }
    return 0;
}

/* True if the tensor's shape begins with these sizes, and its dtype is float32. */
static bool
are_scales(const ca_tensor *tensor, int ndim, const int64_t *sizes)
{
    bool fits = tensor->data != NULL && tensor->dtype == CA_FLOAT32 && tensor->ndim == ndim;
    for (int d = 0; fits && d < ndim; d++) {
        fits = tensor->shape[d] == sizes[d];
    }
    return fits;
}

/* True if the tensors have the shapes of ca_rows. */
static bool
fit_together(const ca_rows *rows)
{
    const ca_tensor *from = &rows->from;
    const ca_tensor *to = &rows->to;
    if (from->ndim != 3 || to->ndim != 4 || rows->count > from->shape[0] ||
        from->shape[1] != to->shape[1]) {
        return false;
    }
    const int64_t size = from->shape[2];
    const int64_t sizes[] = {to->shape[0], to->shape[1], to->shape[2],
                             (size + CA_INT4_GROUP - 1) / CA_INT4_GROUP};
    switch (rows->codes) {
    case CA_CODES_NONE:
        return from->dtype == to->dtype && size == to->shape[3];
    case CA_CODES_INT8:
        return to->dtype == CA_INT8 && size == to->shape[3] && are_scales(&rows->scales, 3, sizes);
    case CA_CODES_INT4:
        return to->dtype == CA_UINT8 && (size + 1) / 2 == to->shape[3] &&
               are_scales(&rows->scales, 4, sizes) && are_scales(&rows->offsets, 4, sizes);
    default:
        return to->dtype == CA_UINT8 && size == to->shape[3] &&
               are_scales(&rows->scales, 1, sizes + 1);
    }
}

/* Copies rows that a launch cannot read where they lie: they are in the pages themselves, or reach
   farther than a buffer of the device. */
static int
set_apart(ca_py_call *call, ca_tensor *from, PyObject *owner, const ca_tensor *pages)
{
    const ca_extent extent = ca_tensor_extent(from);
    const ca_extent written = ca_tensor_extent(pages);
    if (!ca_extents_overlap(&extent, &written) &&
        !ca_exceeds_device(ca_device_get_info(call->device), &extent, 1)) {
        return 0;
    }
    PyObject *copy = ca_py_tensor_copy(call->state, call->device, from, owner, call->name);
    if (copy == NULL) {
        return -1;
    }
    *from = ((ca_py_tensor *)copy)->view;
    call->keep[call->kept++] = copy;
    return 0;
}

/* write_rows(array, name, places, codes, pages, scales, offsets, /): see ca_rows */
static PyObject *
write_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { ARRAY, NAME, PLACES, CODES, PAGES, SCALES, OFFSETS, ARGUMENTS };
    int result = -1;
    ca_py_call call;
    ca_rows rows;
    ca_tensor places;
    int64_t codes;
    CA_NEW_ERROR(error);
    ca_py_call_begin(&call, module, "PagedKVCache.append");
    const char *name =
        ca_py_check_count(nargs, ARGUMENTS) == 0 ? PyUnicode_AsUTF8(args[NAME]) : NULL;
    if (name == NULL || parse_pages(&call, args[PAGES], "the cache", 4, &rows.to) < 0 ||
        parse_scales(&call, args[SCALES], "scales", &rows.scales) < 0 ||
        parse_scales(&call, args[OFFSETS], "offsets", &rows.offsets) < 0 ||
        ca_py_call_array(&call, args[ARRAY], name, CA_TAKES_FLOATS, &rows.from) < 0 ||
        ca_py_int(args[CODES], "codes", CA_CODES_NONE, CA_CODES_INT4, &codes) < 0 ||
        parse_places(&call, args[PLACES], "places", rows.to.shape[0] * rows.to.shape[2], &places) <
            0) {
        goto done;
    }
    rows.codes = (int)codes;
    rows.places = places.data;
    rows.count = places.shape[0];
    rows.call = call.name;
    if (!fit_together(&rows)) {
        (void)ca_py_raise(PyExc_ValueError, "%s does not fit the pages", name);
        goto done;
    }
    if (set_apart(&call, &rows.from, args[ARRAY], &rows.to) < 0) {
        goto done;
    }
    ca_py_work work;
    ca_py_work_begin(&work, call.state, &error);
    ca_status status = ca_rows_write(call.device, &rows, &error);
    ca_py_work_end(&work);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* copy_rows(pages, moves, /): see ca_rows_copy; `moves` has as many sources behind the targets */
static PyObject *
copy_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { PAGES, MOVES, ARGUMENTS };
    int result = -1;
    ca_py_call call;
    ca_tensor pages;
    ca_tensor moves;
    CA_NEW_ERROR(error);
    ca_py_call_begin(&call, module, "PagedKVCache.append");
    if (ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        parse_pages(&call, args[PAGES], "pages", 3, &pages) < 0 ||
        parse_places(&call, args[MOVES], "moves", pages.shape[0] * pages.shape[2], &moves) < 0) {
        goto done;
    }
    ca_py_work work;
    ca_py_work_begin(&work, call.state, &error);
    ca_status status =
        ca_rows_copy(call.device, &pages, moves.data, moves.shape[0] / 2, call.name, &error);
    ca_py_work_end(&work);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

PyMethodDef ca_py_pages_methods[] = {
    {"write_rows", CA_PY_FASTCALL(write_rows), NULL},
    {"copy_rows", CA_PY_FASTCALL(copy_rows), NULL},
    {NULL, NULL, 0, NULL},
};
