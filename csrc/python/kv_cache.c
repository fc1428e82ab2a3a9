/* SPDX-License-Identifier: MIT */
#include "python/kv_cache.h"

#include <string.h>

#include "python/cache.h"
#include "python/error.h"
#include "python/methods.h"
#include "python/mods.h"
#include "python/scalars.h"
#include "python/tensor.h"
#include "python/torch.h"

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

/* Returns memory for `count` numbers, which the caller frees by PyMem_RawFree; NULL with an error. */
static int64_t *
make_numbers(int64_t count, ca_error *error)
{
    int64_t *numbers = PyMem_RawCalloc((size_t)count + 1, sizeof(*numbers));
    if (numbers == NULL) {
        (void)ca_error_set(error, CA_ERROR_MEMORY, "no memory for the places of %lld rows",
                           (long long)count);
    }
    return numbers;
}

/* Checks and writes, then counts the new positions, during a change. A stop leaves the cache as it was: what was
   written lies behind the positions that count. */
static ca_status
append_positions(ca_py_cache *self, const ca_py_call *call, ca_cache_append *append,
                 ca_error *error)
{
    ca_status status = ca_cache_append_check(&self->cache, append, error);
    if (status != CA_OK) {
        return status;
    }
    int64_t *places = make_numbers(ca_cache_append_trim(append), error);
    if (places == NULL) {
        return CA_ERROR_MEMORY;
    }
    ca_cache_append_places(&self->cache, append, places);
    status = ca_py_cache_write(self, call, &append->key, &append->value, places, error);
    PyMem_RawFree(places);
    if (status == CA_OK) {
        ca_mutex_lock(&self->lock.guard);
        ca_cache_append_done(&self->cache, append, self->lengths);
        ca_mutex_unlock(&self->lock.guard);
    }
    return status;
}

/* append(key, value, counts, /) */
PyObject *
ca_py_cache_append(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    enum { KEY, VALUE, COUNTS, ARGUMENTS };
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    ca_cache_append append;
    CA_NEW_ERROR(error);
    if (ca_py_cache_begin(self, &call, "KVCache.append") < 0 ||
        ca_py_check_count(nargs, ARGUMENTS) < 0 ||
        parse_numbers(&call, args[COUNTS], "counts", &append.counts, &append.ncounts) < 0 ||
        ca_py_cache_rows(self, &call, args, 4, &append.key, &append.value) < 0) {
        goto done;
    }
    /* A thread that holds the lock must run no Python code that could wait for the lock. Handlers of signals do run:
       the lock refuses their changes. Raising an exception can run finalizers, so the lock is released first. */
    if (ca_py_lock_change(&self->lock, CA_PY_GROWS, call.name) == 0) {
        ca_status status = append_positions(self, &call, &append, &error);
        ca_py_lock_changed(&self->lock);
        result = ca_py_error_check(call.state, status, &error);
    }
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

const char *const ca_py_cache_attend_arguments[] = CA_PY_TEXTS(CA_PY_CACHE_ATTEND_TAKEN);

PyObject *
ca_py_cache_attend(PyObject *object, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    enum { CA_PY_SLOTS(CA_PY_CACHE_ATTEND_TAKEN) ARGUMENTS };
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
    uint64_t time;
    bool reads = false;
    ca_torch_sdpa_init(&sdpa);
    if (ca_py_cache_begin(self, &call, "KVCache.attend") < 0 ||
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
        ca_py_call_ready(&call, Py_None) < 0 ||
        ca_py_lock_read(&self->lock, call.name, &time) < 0) {
        goto done;
    }
    reads = true;
    if (ca_py_cache_look(self, &cache, &lengths) < 0) {
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
    if (reads) {
        ca_py_lock_has_read(&self->lock, time);
    }
    ca_py_mods_free(&mods);
    ca_py_call_end(&call);
    PyMem_RawFree(lengths);
    return answer;
}

/* truncate(n, /): n is an int for all, or int64 numbers */
PyObject *
ca_py_cache_truncate(PyObject *object, PyObject *n)
{
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    ca_cache_cut cut = {.numbers = NULL};
    CA_NEW_ERROR(error);
    if (ca_py_cache_begin(self, &call, "KVCache.truncate") < 0 ||
        (PyLong_Check(n) ? ca_py_int(n, "n", 0, INT64_MAX, &cut.number)
                         : parse_numbers(&call, n, "n", &cut.numbers, &cut.count)) < 0 ||
        ca_py_lock_change(&self->lock, CA_PY_FORGETS, call.name) < 0) {
        goto done;
    }
    ca_status status = ca_cache_cut_check(&self->cache, &cut, &error);
    if (status == CA_OK) {
        ca_mutex_lock(&self->lock.guard);
        ca_cache_cut_done(&self->cache, &cut, self->lengths);
        ca_mutex_unlock(&self->lock.guard);
    }
    ca_py_lock_changed(&self->lock);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- other sequences ---- */

/* Makes room for the rows of a cache: it becomes Tensors (B, Hk, length, …), which the call keeps. Returns -1 with
   an exception. */
static int
make_room(ca_py_call *call, ca_cache *cache)
{
    ca_tensor *const tensors[] = {&cache->key.pages,    &cache->value.pages, &cache->key.scales,
                                  &cache->value.scales, &cache->key.offsets, &cache->value.offsets};
    for (size_t n = 0; n < sizeof tensors / sizeof tensors[0]; n++) {
        ca_tensor *tensor = tensors[n];
        if (tensor->data == NULL || tensor->ndim < 3) {
            continue;
        }
        tensor->shape[2] = cache->length;
        PyObject *made = ca_py_tensor_empty(call->state, call->device, tensor->dtype, tensor->ndim,
                                            tensor->shape);
        if (made == NULL) {
            return -1;
        }
        *tensor = ((ca_py_tensor *)made)->view;
        call->keep[call->kept++] = made;
    }
    return 0;
}

/* Reorders the sequences, during a change. `before` has room for B lengths. Only the copying to the room may be
   stopped: that from there changes the cache. If the device fails in the midst of it, nobody knows which rows have
   moved. */
static ca_status
reorder_sequences(ca_py_cache *self, const ca_py_call *call, const int64_t *indices,
                  const ca_cache *room, int64_t *before, ca_error *error)
{
    const int64_t rows = ca_cache_capacity(room);
    const int64_t count = ca_cache_reorder_moves(&self->cache, indices, rows, NULL);
    int64_t *moves = make_numbers(4 * count, error);
    if (moves == NULL) {
        return CA_ERROR_MEMORY;
    }
    (void)ca_cache_reorder_moves(&self->cache, indices, rows, moves);
    for (int64_t b = 0; b < ca_cache_batch(&self->cache); b++) {
        before[b] = ca_cache_length(&self->cache, b);
    }
    ca_py_work work;
    ca_py_work_begin(&work, call->state, error);
    ca_status status = ca_py_cache_move(&self->cache, room, call, moves, count, error);
    const bool changes = status == CA_OK;
    if (changes) {
        error->stops = NULL;
        status = ca_py_cache_move(room, &self->cache, call, moves + 2 * count, count, error);
    }
    ca_py_work_end(&work);
    PyMem_RawFree(moves);
    if (changes) {
        ca_mutex_lock(&self->lock.guard);
        if (status == CA_OK) {
            ca_cache_reorder_done(&self->cache, indices, before, self->lengths);
        } else {
            ca_cache_reorder_failed(&self->cache, indices, self->lengths);
        }
        ca_mutex_unlock(&self->lock.guard);
    }
    return status;
}

/* reorder(indices, /): int64 numbers */
PyObject *
ca_py_cache_reorder(PyObject *object, PyObject *argument)
{
    ca_py_cache *self = (ca_py_cache *)object;
    int result = -1;
    ca_py_call call;
    const int64_t *indices;
    int64_t count;
    ca_cache room;
    int64_t *before = NULL;
    CA_NEW_ERROR(error);
    if (ca_py_cache_begin(self, &call, "KVCache.reorder") < 0 ||
        parse_numbers(&call, argument, "indices", &indices, &count) < 0 ||
        ca_py_error_check(call.state, ca_cache_reorder_check(&self->cache, indices, count, &error),
                          &error) < 0) {
        goto done;
    }
    /* Room is made before the change, as Python code may run then. Another thread may have made the sequences
       longer meanwhile. */
    const int kept = call.kept;
    for (bool fits = false; !fits;) {
        PyMem_RawFree(before);
        while (call.kept > kept) {
            Py_DECREF(call.keep[--call.kept]);
        }
        if (ca_py_cache_look(self, &room, &before) < 0 || make_room(&call, &room) < 0 ||
            ca_py_lock_change(&self->lock, CA_PY_OVERWRITES, call.name) < 0) {
            goto done;
        }
        fits = self->cache.length <= ca_cache_capacity(&room);
        if (!fits) {
            ca_py_lock_changed(&self->lock);
        }
    }
    ca_status status = reorder_sequences(self, &call, indices, &room, before, &error);
    ca_py_lock_changed(&self->lock);
    result = ca_py_error_check(call.state, status, &error);
done:
    ca_py_call_end(&call);
    PyMem_RawFree(before);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static bool
are_alike(const ca_kept *a, const ca_kept *b)
{
    return a->codes == b->codes && a->size == b->size && a->pages.dtype == b->pages.dtype &&
           memcmp(a->pages.shape, b->pages.shape, 4 * sizeof(*a->pages.shape)) == 0;
}

/* Copies the rows that `cache`, a copy of the state of `from`, has. */
static ca_status
copy_sequences(ca_py_cache *self, const ca_py_call *call, const ca_cache *cache, ca_error *error)
{
    const int64_t count = ca_cache_copy_moves(cache, NULL);
    int64_t *moves = make_numbers(2 * count, error);
    if (moves == NULL) {
        return CA_ERROR_MEMORY;
    }
    (void)ca_cache_copy_moves(cache, moves);
    ca_py_work work;
    ca_py_work_begin(&work, call->state, error);
    ca_status status = ca_py_cache_move(cache, &self->cache, call, moves, count, error);
    ca_py_work_end(&work);
    PyMem_RawFree(moves);
    return status;
}

/* copy_from(cache, /): this one is new, has the same sizes, and no other thread knows it */
PyObject *
ca_py_cache_copy_from(PyObject *object, PyObject *argument)
{
    ca_py_cache *self = (ca_py_cache *)object;
    ca_py_cache *other = (ca_py_cache *)argument;
    int result = -1;
    ca_py_call call;
    ca_cache cache;
    int64_t *lengths = NULL;
    uint64_t time;
    bool reads = false;
    CA_NEW_ERROR(error);
    if (ca_py_cache_begin(self, &call, "KVCache.copy") < 0) {
        goto done;
    }
    if (!Py_IS_TYPE(argument, Py_TYPE(object)) || !are_alike(&self->cache.key, &other->cache.key) ||
        !are_alike(&self->cache.value, &other->cache.value)) {
        (void)ca_py_raise(PyExc_ValueError, "expected a cache of the same sizes and dtype");
        goto done;
    }
    if (ca_py_lock_read(&other->lock, call.name, &time) < 0) {
        goto done;
    }
    reads = true;
    if (ca_py_cache_look(other, &cache, &lengths) < 0) {
        goto done;
    }
    ca_status status = copy_sequences(self, &call, &cache, &error);
    if (status == CA_OK) {
        memcpy(self->lengths, lengths, (size_t)ca_cache_batch(&cache) * sizeof(*lengths));
        ca_cache_set_lengths(&self->cache, self->lengths);
    }
    result = ca_py_error_check(call.state, status, &error);
done:
    if (reads) {
        ca_py_lock_has_read(&other->lock, time);
    }
    ca_py_call_end(&call);
    PyMem_RawFree(lengths);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}
