/* SPDX-License-Identifier: MIT
 *
 * The type clattn._core.Cache, of which clattn.KVCache is made. It is made of two Tensors (B, Hk,
 * capacity, size), for keys and for values.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <string.h>
#include <structmember.h> /* PyMemberDef */

#include "base/platform.h"
#include "diagonal/copy.h"
#include "doors/cache.h"
#include "python/arguments.h"
#include "python/call.h"
#include "python/error.h"
#include "python/lock.h"
#include "python/methods.h"
#include "python/mods.h"
#include "python/scalars.h"
#include "python/tensor.h"
#include "python/torch.h"

/* Changes of `cache` wait for each other. Readers see a change only when it is complete. */
typedef struct {
    PyObject_HEAD
    PyObject *module;
    PyObject *key; /* Tensors, never replaced */
    PyObject *value;
    ca_py_lock changing; /* held from a change's check to its end */
    ca_mutex guard;      /* of `cache` and `lengths`, for an instant */
    ca_cache cache;
    int64_t *lengths; /* B of them; cache.lengths is this or NULL */
} ca_py_cache;

/* Copies the state of the cache. The caller frees *lengths with PyMem_RawFree; cache->lengths is
   the same memory, or NULL if all lengths are equal. Returns -1 with an exception. */
static int
look(ca_py_cache *self, ca_cache *cache, int64_t **lengths)
{
    int64_t B = self->cache.key.shape[0];
    *lengths = PyMem_RawMalloc((size_t)B * sizeof(**lengths));
    if (*lengths == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    ca_mutex_lock(&self->guard);
    *cache = self->cache;
    for (int64_t b = 0; b < B; b++) {
        (*lengths)[b] = ca_cache_length(cache, b);
    }
    ca_mutex_unlock(&self->guard);
    cache->lengths = cache->lengths != NULL ? *lengths : NULL;
    return 0;
}

/* ---- calls ---- */

/* Starts a call of the method `name` on the cache's device. ca_py_call_end follows in any case. */
static int
begin(ca_py_cache *self, ca_py_call *call, const char *name)
{
    ca_py_call_begin(call, self->module, name);
    return ca_py_call_note(call, self->key, "the cache");
}

/* Reads int64 numbers of one dimension; NULL for None. */
static int
parse_numbers(ca_py_call *call, PyObject *object, const char *name, const int64_t **numbers,
              int64_t *count)
{
    ca_tensor tensor;
    *numbers = NULL;
    *count = 0;
    if (object == Py_None) {
        return 0;
    }
    if (ca_py_call_int64s(call, object, name, &tensor) < 0) {
        return -1;
    }
    *numbers = tensor.data;
    *count = tensor.shape[0];
    return 0;
}

/* Copies a tensor that lies in the cache itself: it may overlap the new positions. */
static int
set_apart(ca_py_call *call, const ca_cache *cache, ca_tensor *tensor, PyObject *owner)
{
    const ca_extent from = ca_tensor_extent(tensor);
    const ca_extent keys = ca_tensor_extent(&cache->key);
    const ca_extent values = ca_tensor_extent(&cache->value);
    if (!ca_extents_overlap(&from, &keys) && !ca_extents_overlap(&from, &values)) {
        return 0;
    }
    PyObject *copy = ca_py_tensor_copy(call->state, call->device, tensor, owner, call->name);
    if (copy == NULL) {
        return -1;
    }
    *tensor = ((ca_py_tensor *)copy)->view;
    call->keep[call->kept++] = copy;
    return 0;
}

/* Copies the new positions of keys and values, one rectangle at a time. */
static ca_status
copy_positions(ca_device *device, const ca_cache *cache, const ca_cache_append *append,
               const char *name, ca_error *error)
{
    ca_status status = CA_OK;
    double asked = ca_seconds();
    int64_t copies = ca_cache_append_copies(cache, append);
    for (int64_t copy = 0; copy < copies; copy++) {
        ca_tensor from;
        ca_tensor to;
        ca_cache_append_copy(cache, append, copy, &from, &to);
        CA_TRY(ca_copy_run(device, &from, &to, name, error));
        CA_TRY(ca_error_ask_now_and_then(error, &asked));
    }
done:
    return status;
}

/* Checks and copies, then counts the new positions. The caller holds `changing`. A stop leaves the
   cache as it was: what was copied lies behind the positions that count. */
static ca_status
append_positions(ca_py_cache *self, const ca_py_call *call, const ca_cache_append *append,
                 ca_error *error)
{
    ca_status status = ca_cache_append_check(&self->cache, append, error);
    if (status == CA_OK) {
        ca_py_work work;
        ca_py_work_begin(&work, call->state, error);
        status = copy_positions(call->device, &self->cache, append, call->name, error);
        ca_py_work_end(&work);
    }
    if (status == CA_OK) {
        ca_mutex_lock(&self->guard);
        ca_cache_append_done(&self->cache, append, self->lengths);
        ca_mutex_unlock(&self->guard);
    }
    return status;
}

/* append(key, value, counts, /) */
static PyObject *
cache_append(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    enum { KEY, VALUE, COUNTS, ARGUMENTS };
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    ca_cache_append append;
    CA_NEW_ERROR(error);
    if (begin(self, &call, "KVCache.append") < 0 || ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        ca_py_call_array(&call, args[KEY], "key", CA_TAKES_FLOATS, &append.key) < 0 ||
        ca_py_call_array(&call, args[VALUE], "value", CA_TAKES_FLOATS, &append.value) < 0 ||
        parse_numbers(&call, args[COUNTS], "counts", &append.counts, &append.ncounts) < 0 ||
        set_apart(&call, &self->cache, &append.key, args[KEY]) < 0 ||
        set_apart(&call, &self->cache, &append.value, args[VALUE]) < 0) {
        goto done;
    }
    /* While the lock is held no Python code runs but handlers of signals, to which the lock is
       refused: other code might wait for it. Making an exception may run the finalizers of any
       objects. */
    if (ca_py_lock_take(&self->changing, call.name) == 0) {
        ca_status status = append_positions(self, &call, &append, &error);
        ca_py_lock_release(&self->changing);
        result = ca_py_error_check(call.state, status, &error);
    }
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

#define ATTEND(ROW, STAR)                                                                          \
    ROW(QUERY, "query")                                                                            \
    STAR()                                                                                         \
    ROW(ATTN_MASK, "attn_mask")                                                                    \
    ROW(IS_CAUSAL, "is_causal")                                                                    \
    ROW(SCALE, "scale")                                                                            \
    ROW(WINDOW, "window")                                                                          \
    ROW(SOFTCAP, "softcap")                                                                        \
    ROW(RETURN_LSE, "return_lse")                                                                  \
    ROW(OUT, "out")                                                                                \
    ROW(MODS, "mods")
const char *const ca_py_cache_attend_arguments[] = CA_PY_TEXTS(ATTEND);

static PyObject *
cache_attend(PyObject *object, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    enum { CA_PY_SLOTS(ATTEND) ARGUMENTS };
    PyObject *args[ARGUMENTS];
    ca_py_cache *self = (ca_py_cache *)object;
    PyObject *answer = NULL;
    int64_t *lengths = NULL;
    ca_py_call call;
    ca_cache cache;
    ca_torch_sdpa sdpa;
    CA_NEW_ERROR(error);
    ca_mods mods;
    mods.numbers = NULL;
    bool causal;
    ca_py_sdpa_results wanted = {.query = NULL};
    int64_t shape[4];
    ca_torch_sdpa_init(&sdpa);
    if (begin(self, &call, "KVCache.attend") < 0 ||
        ca_py_arguments(call.state, CA_PY_CACHE_ATTEND, given, count, names, args) < 0 ||
        ca_py_call_array(&call, args[QUERY], "query", CA_TAKES_FLOATS, &sdpa.query) < 0 ||
        ca_py_call_optional(&call, args[ATTN_MASK], "attn_mask", CA_TAKES_BOOL_AND_FLOATS,
                            &sdpa.attn_mask) < 0 ||
        ca_py_call_note_out(&call, args[OUT]) < 0 ||
        ca_py_flag(args[IS_CAUSAL], "is_causal", &causal) < 0 ||
        ca_py_scale(args[SCALE], &sdpa.has_scale, &sdpa.scale) < 0 ||
        ca_py_window(args[WINDOW], &sdpa.window_left, &sdpa.window_right) < 0 ||
        ca_py_double(args[SOFTCAP], "softcap", &sdpa.softcap) < 0 ||
        ca_py_flag(args[RETURN_LSE], "return_lse", &wanted.return_lse) < 0 ||
        ca_py_mods_parse(&call, args[MODS], sdpa.query.dtype == CA_FLOAT64, &mods) < 0 ||
        ca_py_call_ready(&call, Py_None) < 0 || look(self, &cache, &lengths) < 0) {
        goto done;
    }
    sdpa.has_mask = args[ATTN_MASK] != Py_None;
    sdpa.causal = causal ? CA_CAUSAL_LOWER_RIGHT : CA_CAUSAL_NONE;
    sdpa.mods = args[MODS] != Py_None ? &mods : NULL;
    wanted.query = args[QUERY];
    wanted.out = args[OUT] != Py_None ? args[OUT] : NULL;
    ca_status status = ca_cache_attend_check(&cache, &sdpa, shape, &error);
    if (ca_py_error_check(call.state, status, &error) == 0) {
        answer = ca_py_sdpa_run(&call, &sdpa, &cache, &wanted, 4, shape);
    }
done:
    ca_py_mods_free(&mods);
    ca_py_call_end(&call);
    PyMem_RawFree(lengths);
    return answer;
}

/* truncate(n, /): n is an int for all, or int64 numbers */
static PyObject *
cache_truncate(PyObject *object, PyObject *n)
{
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    ca_cache_cut cut = {.numbers = NULL};
    CA_NEW_ERROR(error);
    if (begin(self, &call, "KVCache.truncate") < 0 ||
        (PyLong_Check(n) ? ca_py_int(n, "n", 0, INT64_MAX, &cut.number)
                         : parse_numbers(&call, n, "n", &cut.numbers, &cut.count)) < 0 ||
        ca_py_lock_take(&self->changing, call.name) < 0) {
        goto done;
    }
    ca_status status = ca_cache_cut_check(&self->cache, &cut, &error);
    if (status == CA_OK) {
        ca_mutex_lock(&self->guard);
        ca_cache_cut_done(&self->cache, &cut, self->lengths);
        ca_mutex_unlock(&self->guard);
    }
    ca_py_lock_release(&self->changing);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- other sequences ---- */

/* Keys and values set apart: Tensors (B, Hk, length, size), which the call keeps. */
typedef struct {
    ca_tensor key;
    ca_tensor value;
} ca_apart;

/* Makes room for the sequences of a cache. Returns -1 with an exception. */
static int
make_room(ca_py_call *call, const ca_cache *cache, ca_apart *apart)
{
    const ca_tensor *held[] = {&cache->key, &cache->value};
    ca_tensor *rooms[] = {&apart->key, &apart->value};
    for (int part = 0; part < 2; part++) {
        const int64_t *sizes = held[part]->shape;
        const int64_t shape[] = {sizes[0], sizes[1], cache->length, sizes[3]};
        PyObject *room = ca_py_tensor_empty(call->state, call->device, held[part]->dtype, 4, shape);
        if (room == NULL) {
            return -1;
        }
        *rooms[part] = ((ca_py_tensor *)room)->view;
        call->keep[call->kept++] = room;
    }
    return 0;
}

/* Copies positions 0 … length - 1 of sequence `from_b` to sequence `to_b`; -1: of all. */
static ca_status
copy_sequence(ca_device *device, const ca_tensor *from, int64_t from_b, const ca_tensor *to,
              int64_t to_b, int64_t length, const char *name, ca_error *error)
{
    const ca_tensor source = ca_cache_positions(from, from_b, length);
    const ca_tensor target = ca_cache_positions(to, to_b, length);
    return ca_copy_run(device, &source, &target, name, error);
}

/* Copies what moves to the room, and from there to its place. Only the first half may be stopped: the
   second changes the cache. */
static ca_status
move_sequences(const ca_py_call *call, const ca_cache *cache, const int64_t *indices,
               const ca_apart *apart, ca_error *error)
{
    ca_status status = CA_OK;
    const struct {
        const ca_tensor *held;
        const ca_tensor *room;
    } parts[] = {{&cache->key, &apart->key}, {&cache->value, &apart->value}};
    double asked = ca_seconds();
    for (int step = 0; step < 4; step++) {
        const ca_tensor *held = parts[step % 2].held;
        const ca_tensor *room = parts[step % 2].room;
        error->stops = step < 2 ? error->stops : NULL;
        for (int64_t b = 0; b < cache->key.shape[0]; b++) {
            const int64_t from = indices[b];
            const int64_t length = ca_cache_length(cache, from);
            if (from == b) {
                continue;
            }
            CA_TRY(step < 2
                       ? copy_sequence(call->device, held, from, room, b, length, call->name, error)
                       : copy_sequence(call->device, room, b, held, b, length, call->name, error));
            CA_TRY(ca_error_ask_now_and_then(error, &asked));
        }
    }
done:
    return status;
}

/* Reorders the sequences. The caller holds `changing`; `before` has room for B lengths. */
static ca_status
reorder_sequences(ca_py_cache *self, const ca_py_call *call, const int64_t *indices,
                  const ca_apart *apart, int64_t *before, ca_error *error)
{
    ca_status status;
    for (int64_t b = 0; b < self->cache.key.shape[0]; b++) {
        before[b] = ca_cache_length(&self->cache, b);
    }
    ca_py_work work;
    ca_py_work_begin(&work, call->state, error);
    status = move_sequences(call, &self->cache, indices, apart, error);
    ca_py_work_end(&work);
    if (status == CA_OK) {
        ca_mutex_lock(&self->guard);
        ca_cache_reorder_done(&self->cache, indices, before, self->lengths);
        ca_mutex_unlock(&self->guard);
    }
    return status;
}

/* reorder(indices, /): int64 numbers */
static PyObject *
cache_reorder(PyObject *object, PyObject *argument)
{
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    const int64_t *indices;
    int64_t count;
    ca_cache cache;
    ca_apart apart;
    int64_t *before = NULL;
    CA_NEW_ERROR(error);
    if (begin(self, &call, "KVCache.reorder") < 0 ||
        parse_numbers(&call, argument, "indices", &indices, &count) < 0 ||
        ca_py_error_check(call.state, ca_cache_reorder_check(&self->cache, indices, count, &error),
                          &error) < 0) {
        goto done;
    }
    /* Room is made before the lock is held, as Python code may run then. Another thread may have
       made the sequences longer meanwhile. */
    const int kept = call.kept;
    for (bool fits = false; !fits;) {
        PyMem_RawFree(before);
        while (call.kept > kept) {
            Py_DECREF(call.keep[--call.kept]);
        }
        if (look(self, &cache, &before) < 0 || make_room(&call, &cache, &apart) < 0 ||
            ca_py_lock_take(&self->changing, call.name) < 0) {
            goto done;
        }
        fits = self->cache.length <= cache.length;
        if (!fits) {
            ca_py_lock_release(&self->changing);
        }
    }
    ca_status status = reorder_sequences(self, &call, indices, &apart, before, &error);
    ca_py_lock_release(&self->changing);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    PyMem_RawFree(before);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* copy_from(cache, /): this one is new, has the same sizes, and no other thread knows it */
static PyObject *
cache_copy_from(PyObject *object, PyObject *argument)
{
    ca_py_cache *self = (ca_py_cache *)object;
    ca_py_cache *other = (ca_py_cache *)argument;
    int result = -1;
    ca_py_call call;
    CA_NEW_ERROR(error);
    if (begin(self, &call, "KVCache.copy") < 0) {
        goto done;
    }
    if (!Py_IS_TYPE(argument, Py_TYPE(object)) ||
        memcmp(self->cache.key.shape, other->cache.key.shape, 4 * sizeof(int64_t)) != 0 ||
        self->cache.value.shape[3] != other->cache.value.shape[3] ||
        self->cache.key.dtype != other->cache.key.dtype) {
        (void)ca_py_raise(PyExc_ValueError, "expected a cache of the same sizes and dtype");
        goto done;
    }
    if (ca_py_lock_take(&other->changing, call.name) < 0) {
        goto done;
    }
    for (int64_t b = 0; b < other->cache.key.shape[0]; b++) {
        self->lengths[b] = ca_cache_length(&other->cache, b);
    }
    ca_py_work work;
    ca_py_work_begin(&work, call.state, &error);
    ca_status status = copy_sequence(call.device, &other->cache.key, -1, &self->cache.key, -1,
                                     other->cache.length, call.name, &error);
    if (status == CA_OK) {
        status = copy_sequence(call.device, &other->cache.value, -1, &self->cache.value, -1,
                               other->cache.length, call.name, &error);
    }
    ca_py_work_end(&work);
    ca_py_lock_release(&other->changing);
    if (status == CA_OK) {
        ca_cache_set_lengths(&self->cache, self->lengths);
    }
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
cache_renew_lock(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    ca_py_cache *self = (ca_py_cache *)object;
    if (ca_py_lock_init(&self->changing) < 0) { /* the old one's holder is not in this process */
        return NULL;
    }
    ca_mutex_init(&self->guard);
    Py_RETURN_NONE;
}

static PyObject *
get_length(PyObject *object, void *Py_UNUSED(closure))
{
    ca_py_cache *self = (ca_py_cache *)object;
    ca_mutex_lock(&self->guard);
    int64_t length = self->cache.length;
    ca_mutex_unlock(&self->guard);
    return PyLong_FromLongLong(length);
}

static PyObject *
get_lengths(PyObject *object, void *Py_UNUSED(closure))
{
    ca_cache cache;
    int64_t *lengths;
    if (look((ca_py_cache *)object, &cache, &lengths) < 0) {
        return NULL;
    }
    PyObject *tuple = ca_py_tuple(cache.key.shape[0], lengths, 1);
    PyMem_RawFree(lengths);
    return tuple;
}

/* ---- the type ---- */

/* Cache(key, value) */
static PyObject *
cache_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *module = PyType_GetModule(type);
    PyTypeObject *tensor_type = ca_state_get(module)->tensor_type;
    PyObject *key;
    PyObject *value;
    if (!PyArg_ParseTuple(args, "O!O!", tensor_type, &key, tensor_type, &value)) {
        return NULL;
    }
    const ca_tensor *keys = &((ca_py_tensor *)key)->view;
    const ca_tensor *values = &((ca_py_tensor *)value)->view;
    if (keys->ndim != 4 || values->ndim != 4 || keys->shape[0] < 1 || keys->shape[1] < 1 ||
        memcmp(keys->shape, values->shape, 3 * sizeof(*keys->shape)) != 0 ||
        ca_py_tensor_device(key) != ca_py_tensor_device(value)) {
        return PyErr_Format(PyExc_ValueError, "key and value are no cache's");
    }
    ca_py_cache *self = (ca_py_cache *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->module = Py_NewRef(module);
    self->key = Py_NewRef(key);
    self->value = Py_NewRef(value);
    self->cache = (ca_cache){.key = *keys, .value = *values};
    ca_mutex_init(&self->guard);
    self->lengths = PyMem_RawCalloc((size_t)keys->shape[0], sizeof(*self->lengths));
    if (self->lengths == NULL) {
        PyErr_NoMemory();
    }
    if (self->lengths == NULL || ca_py_lock_init(&self->changing) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    ca_py_cache *self = (ca_py_cache *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->module);
    Py_VISIT(self->key);
    Py_VISIT(self->value);
    return 0;
}

static void
dealloc(PyObject *object)
{
    ca_py_cache *self = (ca_py_cache *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    ca_py_lock_destroy(&self->changing);
    ca_mutex_destroy(&self->guard);
    PyMem_RawFree(self->lengths);
    Py_CLEAR(self->key);
    Py_CLEAR(self->value);
    Py_CLEAR(self->module);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"append", CA_PY_FASTCALL(cache_append), NULL},
    {"attend", CA_PY_NAMED(cache_attend), CA_PY_SIGNATURE("attend", "$self", ATTEND)},
    {"truncate", cache_truncate, METH_O, NULL},
    {"reorder", cache_reorder, METH_O, NULL},
    {"copy_from", cache_copy_from, METH_O, NULL},
    {"renew_lock", cache_renew_lock, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"key", T_OBJECT_EX, offsetof(ca_py_cache, key), READONLY, NULL},
    {"value", T_OBJECT_EX, offsetof(ca_py_cache, value), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"length", get_length, NULL, NULL, NULL},
    {"lengths", get_lengths, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, cache_new},
    {Py_tp_traverse, traverse},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec ca_py_cache_spec = {
    .name = "clattn._core.Cache",
    .basicsize = sizeof(ca_py_cache),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
