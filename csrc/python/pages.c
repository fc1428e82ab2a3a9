/* SPDX-License-Identifier: MIT
 *
 * The methods of clattn._core.Cache for clattn.PagedKVCache, which knows the pages of each sequence. Places are
 * checked here: a wrong call writes to no memory that is not the cache's.
 */
#include "python/pages.h"

#include "python/cache.h"
#include "python/error.h"
#include "python/methods.h"

/* Reads places, each below the number of rows of all pages. */
static int
parse_places(ca_py_call *call, const ca_cache *cache, PyObject *object, const char *name,
             ca_tensor *numbers)
{
    const int64_t *sizes = cache->key.pages.shape;
    if (ca_py_call_int64s(call, object, name, numbers) < 0) {
        return -1;
    }
    const int64_t *places = numbers->data;
    for (int64_t n = 0; n < numbers->shape[0]; n++) {
        if (places[n] < 0 || places[n] >= sizes[0] * sizes[2]) {
            return ca_py_raise(PyExc_ValueError, "%s[%lld] is %lld; expected 0 to %lld", name,
                               (long long)n, (long long)places[n],
                               (long long)(sizes[0] * sizes[2] - 1));
        }
    }
    return 0;
}

/* count_rows(key, value, /): n of checked keys and values (n, Hk, size) */
PyObject *
ca_py_cache_count_rows(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    enum { KEY, VALUE, ARGUMENTS };
    PyObject *answer = NULL;
    ca_py_cache *self = (ca_py_cache *)object;
    ca_py_call call;
    ca_tensor key;
    ca_tensor value;
    CA_NEW_ERROR(error);
    if (ca_py_cache_begin(self, &call, "PagedKVCache.append") == 0 &&
        ca_py_check_count(nargs, ARGUMENTS) == 0 &&
        ca_py_call_array(&call, args[KEY], "key", CA_TAKES_FLOATS, &key) == 0 &&
        ca_py_call_array(&call, args[VALUE], "value", CA_TAKES_FLOATS, &value) == 0 &&
        ca_py_error_check(call.state, ca_cache_rows_check(&self->cache, &key, &value, 3, &error),
                          &error) == 0) {
        answer = PyLong_FromLongLong(key.shape[0]);
    }
    ca_py_call_end(&call);
    return answer;
}

/* View the first `count` rows of (n, Hk, size) as (1, Hk, count, size). */
static ca_tensor
as_entry(const ca_tensor *rows, int64_t count)
{
    ca_tensor view;
    ca_tensor_start_view(rows, &view);
    ca_tensor_add_dim(&view, 1, 0);
    ca_tensor_add_dim(&view, rows->shape[1], rows->strides[1]);
    ca_tensor_add_dim(&view, count, rows->strides[0]);
    ca_tensor_add_dim(&view, rows->shape[2], rows->strides[2]);
    return view;
}

/* write_rows(key, value, places, /): the first rows, one for each place */
PyObject *
ca_py_cache_write_rows(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    enum { KEY, VALUE, PLACES, ARGUMENTS };
    int result = -1;
    ca_py_cache *self = (ca_py_cache *)object;
    ca_py_call call;
    ca_tensor key;
    ca_tensor value;
    ca_tensor places;
    CA_NEW_ERROR(error);
    if (ca_py_cache_begin(self, &call, "PagedKVCache.append") < 0 ||
        ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        parse_places(&call, &self->cache, args[PLACES], "places", &places) < 0 ||
        ca_py_cache_rows(self, &call, args, 3, &key, &value) < 0) {
        goto done;
    }
    if (places.shape[0] > key.shape[0]) {
        (void)ca_py_raise(PyExc_ValueError, "there are more places than rows");
        goto done;
    }
    const ca_tensor keys = as_entry(&key, places.shape[0]);
    const ca_tensor values = as_entry(&value, places.shape[0]);
    ca_status status = ca_py_cache_write(self, &call, &keys, &values, places.data, &error);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* copy_rows(moves, /): places that are written to, and behind them as many that are read */
PyObject *
ca_py_cache_copy_rows(PyObject *object, PyObject *argument)
{
    int result = -1;
    ca_py_cache *self = (ca_py_cache *)object;
    ca_py_call call;
    ca_tensor moves;
    CA_NEW_ERROR(error);
    if (ca_py_cache_begin(self, &call, "PagedKVCache.append") == 0 &&
        parse_places(&call, &self->cache, argument, "moves", &moves) == 0) {
        ca_py_work work;
        ca_py_work_begin(&work, call.state, &error);
        ca_status status = ca_py_cache_move(&self->cache, &self->cache, &call, moves.data,
                                            moves.shape[0] / 2, &error);
        ca_py_work_end(&work);
        result = ca_py_error_check(call.state, status, &error);
    }
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- who reads and changes ---- */

/* What a `with` statement holds. Where the handler of a signal raises before its block, the object's end is that
   of the reading or of the change. */
typedef struct {
    PyObject_HEAD
    ca_py_cache *cache; /* NULL: it has ended */
    bool reads;
    uint64_t time;
} hold;

static void
end_hold(hold *self)
{
    ca_py_cache *cache = self->cache;
    self->cache = NULL;
    if (cache != NULL && self->reads) {
        ca_py_lock_has_read(&cache->lock, self->time);
    } else if (cache != NULL) {
        ca_py_lock_changed(&cache->lock);
    }
    Py_XDECREF((PyObject *)cache);
}

/* Reads a word of python/lock.h: "reads", or a change. */
static int
parse_hold(PyObject *word, bool *reads, ca_py_change *change)
{
    static const char *const words[] = {[CA_PY_GROWS] = "grows",
                                        [CA_PY_SHARES] = "shares",
                                        [CA_PY_FORGETS] = "forgets",
                                        [CA_PY_OVERWRITES] = "overwrites"};
    *reads = PyUnicode_Check(word) && PyUnicode_CompareWithASCIIString(word, "reads") == 0;
    for (*change = CA_PY_GROWS; !*reads && *change <= CA_PY_OVERWRITES; (*change)++) {
        if (PyUnicode_Check(word) && PyUnicode_CompareWithASCIIString(word, words[*change]) == 0) {
            return 0;
        }
    }
    return *reads ? 0 : ca_py_refuse(PyExc_ValueError, "hold", word, "a word of python/lock.h");
}

/* hold(word, name, /): name is the method's */
PyObject *
ca_py_cache_hold(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    enum { WORD, NAME, ARGUMENTS };
    ca_py_cache *self = (ca_py_cache *)object;
    PyTypeObject *type = ca_state_get(self->module)->hold_type;
    bool reads;
    ca_py_change change;
    if (ca_py_check_count(nargs, ARGUMENTS) < 0 || parse_hold(args[WORD], &reads, &change) < 0) {
        return NULL;
    }
    const char *name = PyUnicode_AsUTF8(args[NAME]);
    hold *made = name != NULL ? (hold *)type->tp_alloc(type, 0) : NULL;
    if (made == NULL) {
        return NULL;
    }
    made->reads = reads;
    if ((reads ? ca_py_lock_read(&self->lock, name, &made->time)
               : ca_py_lock_change(&self->lock, change, name)) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    made->cache = (ca_py_cache *)Py_NewRef(object);
    return (PyObject *)made;
}

static PyObject *
hold_enter(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(self);
}

static PyObject *
hold_exit(PyObject *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    end_hold((hold *)self);
    Py_RETURN_NONE;
}

static void
hold_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    end_hold((hold *)object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef hold_methods[] = {
    {"__enter__", hold_enter, METH_NOARGS, NULL},
    {"__exit__", CA_PY_FASTCALL(hold_exit), NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot hold_slots[] = {
    {Py_tp_dealloc, hold_dealloc},
    {Py_tp_methods, hold_methods},
    {0, NULL},
};

PyType_Spec ca_py_hold_spec = {
    .name = "clattn._core.Hold",
    .basicsize = sizeof(hold),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = hold_slots,
};
