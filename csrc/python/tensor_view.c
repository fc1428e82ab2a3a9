/* SPDX-License-Identifier: MIT */
#include "python/tensor_view.h"

#include <string.h>

#include "python/error.h"
#include "python/scalars.h"

#define MOST_DIMS (CA_MAX_DIMS - 1)

/* ---- indexing ---- */

static int
append(ca_tensor *view, int64_t size, int64_t stride)
{
    if (view->ndim == MOST_DIMS) {
        return ca_py_raise(PyExc_IndexError, "the index makes more than %d dimensions", MOST_DIMS);
    }
    view->shape[view->ndim] = size;
    view->strides[view->ndim++] = stride;
    return 0;
}

static void
move_start(ca_tensor *view, int64_t elements)
{
    view->data = (char *)view->data + elements * (ptrdiff_t)ca_dtype_size(view->dtype);
}

static bool
is_integer(PyObject *key)
{
    return PyIndex_Check(key) && !PyBool_Check(key) && !PyObject_HasAttrString(key, "__len__") &&
           !ca_py_is_numpy_bool(key);
}

static int
take_integer(const ca_tensor *tensor, int d, PyObject *key, ca_tensor *view)
{
    Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) {
        return -1;
    }
    int64_t size = tensor->shape[d];
    if (index < -size || index >= size) {
        return ca_py_raise(PyExc_IndexError,
                           "index %zd is out of bounds for dimension %d of size %lld", index, d,
                           (long long)size);
    }
    move_start(view, (index < 0 ? index + size : index) * tensor->strides[d]);
    return 0;
}

static int
take_slice(const ca_tensor *tensor, int d, PyObject *key, ca_tensor *view)
{
    Py_ssize_t start;
    Py_ssize_t stop;
    Py_ssize_t step;
    if (PySlice_Unpack(key, &start, &stop, &step) < 0) {
        return -1;
    }
    Py_ssize_t size = PySlice_AdjustIndices((Py_ssize_t)tensor->shape[d], &start, &stop, step);
    if (size > 0) {
        move_start(view, start * tensor->strides[d]);
    }
    return append(view, size, tensor->strides[d] * (size > 1 ? step : 1));
}

/* Counts the dimensions that the keys take. Refuses a second `...`. */
static int
count_keys(PyObject *keys, int *taken)
{
    bool ellipsis = false;
    *taken = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        if (key == Py_Ellipsis) {
            if (ellipsis) {
                return ca_py_raise(PyExc_IndexError,
                                   "an index can only have a single ellipsis ('...')");
            }
            ellipsis = true;
        } else if (PySlice_Check(key) || is_integer(key)) {
            (*taken)++;
        } else if (key != Py_None) {
            return ca_py_raise(PyExc_TypeError,
                               "a Tensor is indexed with integers, slices, ... and None, got "
                               "%.200s; advanced indexing is NumPy's: tensor.numpy()[...]",
                               Py_TYPE(key)->tp_name);
        }
    }
    return 0;
}

static int
index_with(const ca_tensor *tensor, PyObject *keys, ca_tensor *view)
{
    int taken;
    int d = 0;
    if (count_keys(keys, &taken) < 0) {
        return -1;
    }
    if (taken > tensor->ndim) {
        return ca_py_raise(
            PyExc_IndexError,
            "too many indices for a Tensor: it has %d dimensions, but %d were indexed",
            tensor->ndim, taken);
    }
    ca_tensor_start_view(tensor, view);
    for (Py_ssize_t i = 0; i <= PyTuple_GET_SIZE(keys); i++) {
        bool end = i == PyTuple_GET_SIZE(keys);
        PyObject *key = end ? Py_Ellipsis : PyTuple_GET_ITEM(keys, i);
        int done = 0;
        if (key == Py_Ellipsis) {
            int kept = end ? tensor->ndim - d : tensor->ndim - taken;
            for (; kept > 0 && done == 0; kept--, d++) {
                done = append(view, tensor->shape[d], tensor->strides[d]);
            }
        } else if (key == Py_None) {
            done = append(view, 1, 0);
        } else {
            done = PySlice_Check(key) ? take_slice(tensor, d, key, view)
                                      : take_integer(tensor, d, key, view);
            d++;
        }
        if (done < 0) {
            return -1;
        }
    }
    return 0;
}

int
ca_py_view_index(const ca_tensor *tensor, PyObject *key, ca_tensor *view)
{
    PyObject *keys = PyTuple_Check(key) ? Py_NewRef(key) : PyTuple_Pack(1, key);
    if (keys == NULL) {
        return -1;
    }
    int result = index_with(tensor, keys, view);
    Py_DECREF(keys);
    return result;
}

/* ---- transposing ---- */

/* Returns the numbers of a method that takes numbers or one sequence of them. */
static PyObject *
numbers_of(PyObject *args)
{
    bool sequence = PyTuple_GET_SIZE(args) == 1 && (PyTuple_Check(PyTuple_GET_ITEM(args, 0)) ||
                                                    PyList_Check(PyTuple_GET_ITEM(args, 0)));
    return PySequence_Tuple(sequence ? PyTuple_GET_ITEM(args, 0) : args);
}

static int
transpose_with(const ca_tensor *tensor, PyObject *axes, ca_tensor *view)
{
    bool taken[CA_MAX_DIMS] = {false};
    if (PyTuple_GET_SIZE(axes) != tensor->ndim) {
        return ca_py_raise(PyExc_ValueError,
                           "axes are %zd numbers; expected %d, one for each dimension",
                           PyTuple_GET_SIZE(axes), tensor->ndim);
    }
    ca_tensor_start_view(tensor, view);
    for (int i = 0; i < tensor->ndim; i++) {
        int64_t axis;
        if (ca_py_int(PyTuple_GET_ITEM(axes, i), "an axis", -tensor->ndim, tensor->ndim - 1,
                      &axis) < 0) {
            return -1;
        }
        axis = axis < 0 ? axis + tensor->ndim : axis;
        if (taken[axis]) {
            return ca_py_raise(PyExc_ValueError, "axis %lld is given twice", (long long)axis);
        }
        taken[axis] = true;
        (void)append(view, tensor->shape[axis], tensor->strides[axis]);
    }
    return 0;
}

int
ca_py_view_transpose(const ca_tensor *tensor, PyObject *args, ca_tensor *view)
{
    bool all = args == NULL || PyTuple_GET_SIZE(args) == 0 ||
               (PyTuple_GET_SIZE(args) == 1 && PyTuple_GET_ITEM(args, 0) == Py_None);
    if (all) {
        ca_tensor_start_view(tensor, view);
        for (int d = tensor->ndim - 1; d >= 0; d--) {
            (void)append(view, tensor->shape[d], tensor->strides[d]);
        }
        return 0;
    }
    PyObject *axes = numbers_of(args);
    if (axes == NULL) {
        return -1;
    }
    int result = transpose_with(tensor, axes, view);
    Py_DECREF(axes);
    return result;
}

/* ---- reshaping ---- */

/* Returns the product of the sizes. INT64_MAX, more than any tensor has, if the product without
   zeros is too large. */
static int64_t
product(int ndim, const int64_t *shape)
{
    int64_t count = 1;
    bool empty = false;
    for (int d = 0; d < ndim; d++) {
        empty = empty || shape[d] == 0;
        if (shape[d] > 0 && count > INT64_MAX / shape[d]) {
            return INT64_MAX;
        }
        count *= shape[d] > 0 ? shape[d] : 1;
    }
    return empty ? 0 : count;
}

static int
refuse_shape(const ca_tensor *tensor, int ndim, const int64_t *shape)
{
    return ca_py_raise(PyExc_ValueError, "cannot reshape a Tensor of shape %s into %s",
                       CA_SHAPE_OF(tensor), CA_SHAPE_WORDS(ndim, shape));
}

static int
parse_shape(const ca_tensor *tensor, PyObject *sizes, int *ndim, int64_t *shape)
{
    int unknown = -1;
    if (PyTuple_GET_SIZE(sizes) > MOST_DIMS) {
        return ca_py_raise(PyExc_ValueError, "shape has %zd dimensions; expected at most %d",
                           PyTuple_GET_SIZE(sizes), MOST_DIMS);
    }
    *ndim = (int)PyTuple_GET_SIZE(sizes);
    for (int d = 0; d < *ndim; d++) {
        if (ca_py_int(PyTuple_GET_ITEM(sizes, d), "a size of shape", -1, INT64_MAX, &shape[d]) <
            0) {
            return -1;
        }
        if (shape[d] == -1 && unknown >= 0) {
            return ca_py_raise(PyExc_ValueError, "shape has more than one -1");
        }
        unknown = shape[d] == -1 ? d : unknown;
    }
    int64_t count = ca_tensor_count(tensor);
    if (unknown >= 0) {
        shape[unknown] = 1;
        int64_t known = product(*ndim, shape);
        if (known == 0 || count % known != 0) {
            shape[unknown] = -1;
            return refuse_shape(tensor, *ndim, shape);
        }
        shape[unknown] = count / known;
    }
    return product(*ndim, shape) == count ? 0 : refuse_shape(tensor, *ndim, shape);
}

int
ca_py_shape_argument(const ca_tensor *tensor, PyObject *args, int *ndim, int64_t shape[CA_MAX_DIMS])
{
    PyObject *sizes = numbers_of(args);
    if (sizes == NULL) {
        return -1;
    }
    int result = parse_shape(tensor, sizes, ndim, shape);
    Py_DECREF(sizes);
    return result;
}

/* Returns the tensor without its dimensions of size 1. */
static ca_tensor
squeeze(const ca_tensor *tensor)
{
    ca_tensor view;
    ca_tensor_start_view(tensor, &view);
    for (int d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] != 1) {
            (void)append(&view, tensor->shape[d], tensor->strides[d]);
        }
    }
    return view;
}

/* Old and new dimensions are grouped: a group is the fewest dimensions with as many elements on
   both sides. The old dimensions of a group must lie in one step. */
bool
ca_py_view_reshape(const ca_tensor *tensor, int ndim, const int64_t *shape, ca_tensor *view)
{
    ca_tensor from = squeeze(tensor);
    ca_tensor_start_view(tensor, view);
    view->ndim = ndim;
    memcpy(view->shape, shape, (size_t)ndim * sizeof(*shape));
    memset(view->strides, 0, (size_t)ndim * sizeof(*view->strides));
    if (product(ndim, shape) == 0) {
        return true;
    }
    int old = 0;
    for (int first = 0, last; first < ndim && old < from.ndim; first = last) {
        int64_t wanted = shape[first];
        int64_t found = from.shape[old++];
        last = first + 1;
        while (wanted != found) {
            if (wanted < found) {
                wanted *= shape[last++];
            } else {
                if (from.strides[old - 1] != from.shape[old] * from.strides[old]) {
                    return false;
                }
                found *= from.shape[old++];
            }
        }
        int64_t stride = from.strides[old - 1];
        for (int d = last - 1; d >= first; d--) {
            view->strides[d] = shape[d] > 1 ? stride : 0;
            stride *= shape[d];
        }
    }
    return true;
}
