/* SPDX-License-Identifier: MIT
 *
 * Torch's door: shapes, broadcasting, grouped heads, causality, windows.
 */
#include "doors/torch.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "doors/common.h"

void
ca_torch_sdpa_init(ca_torch_sdpa *call)
{
    ca_tensor *tensors[] = {&call->query,          &call->key,         &call->value,
                            &call->attn_mask,      &call->sinks,       &call->offsets,
                            &call->blocks.entries, &call->key_scale,   &call->value_scale,
                            &call->key_offset,     &call->value_offset};
    call->has_mask = false;
    call->position = 0;
    call->causal = CA_CAUSAL_NONE;
    call->enable_gqa = false;
    call->has_scale = false;
    call->softcap = 0;
    call->window_left = CA_BAND_UNBOUNDED;
    call->window_right = CA_BAND_UNBOUNDED;
    call->dropout = 0;
    call->seed = 0;
    call->returns_weights = false;
    call->mods = NULL;
    call->sequences = NULL;
    call->code = 0;
    for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++) {
        ca_tensor_set_absent(tensors[t]);
    }
}

static ca_status
check_heads(const ca_torch_sdpa *call, ca_error *error)
{
    int64_t Hq = ca_tensor_size(&call->query, 3);
    int64_t Hk = ca_tensor_size(&call->key, 3);
    if (ca_tensor_size(&call->value, 3) != Hk) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "value has %lld heads; expected %lld, as many as key, with enable_gqa",
                            (long long)ca_tensor_size(&call->value, 3), (long long)Hk);
    }
    if (Hk == 0 ? Hq != 0 : Hq % Hk != 0) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "query has %lld heads; expected a multiple of key's %lld, with enable_gqa",
            (long long)Hq, (long long)Hk);
    }
    return CA_OK;
}

/* Broadcast `shape` by the tensor's dimensions, counted from the end, from `first` on. */
static ca_status
broadcast_leading(const ca_tensor *tensor, const char *name, int first, int ndim, int64_t *shape,
                  ca_error *error)
{
    for (int d = first; d <= tensor->ndim; d++) {
        int64_t *common = &shape[ndim - d];
        int64_t size = ca_tensor_size(tensor, d);
        if (*common == 1) {
            *common = size;
        } else if (size != 1 && size != *common) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "%s has shape %s, whose dimension %d of size %lld does not "
                                "broadcast with the others' %lld%s",
                                name, CA_SHAPE_OF(tensor), -d, (long long)size, (long long)*common,
                                d == 3 ? " (for grouped heads: enable_gqa=True)" : "");
        }
    }
    return CA_OK;
}

/* What the caller of a mask that does not broadcast to the scores probably means. */
static const char *
advise_on_mask(const ca_tensor *mask, int ndim, const int64_t *scores)
{
    const int64_t L = scores[ndim - 2], S = scores[ndim - 1];
    const int64_t rows = ca_tensor_size(mask, 2), keys = ca_tensor_size(mask, 1);
    if (L != S && rows == S && keys == L) {
        return "; its rows are keys: give mask.swapaxes(-2, -1)";
    }
    if (ndim != 4 || keys != S) {
        return "";
    }
    if (mask->ndim == 2 && rows == scores[0]) {
        return "; for padding (B, S) give mask[:, None, None, :]";
    }
    if (mask->ndim == 3 && rows == L && mask->shape[0] == scores[0]) {
        return "; for (B, L, S) give mask[:, None]";
    }
    if (mask->ndim == 3 && rows == L && mask->shape[0] == scores[0] * scores[1]) {
        return "; for (B * Hq, L, S) give mask.reshape(B, Hq, L, S)";
    }
    return "";
}

static ca_status
check_mask(const ca_tensor *mask, int ndim, const int64_t *shape, int64_t S, ca_error *error)
{
    int64_t scores[CA_MAX_DIMS];
    ca_tensor view;
    memcpy(scores, shape, (size_t)ndim * sizeof(*scores));
    scores[ndim - 1] = S;
    if (mask->ndim > ndim || !ca_door_broadcast(mask, ndim, scores, &view)) {
        return ca_error_set(
            error, CA_ERROR_VALUE, "attn_mask has shape %s; expected one that broadcasts to %s%s",
            CA_SHAPE_OF(mask), CA_SHAPE_WORDS(ndim, scores), advise_on_mask(mask, ndim, scores));
    }
    return CA_OK;
}

/* Kernels give mods the positions of rows in 32 bits. */
#define HIGHEST_POSITION (INT32_MAX / 2)

/* Check the positions of rows, and find those of the first and of the last row. */
static ca_status
check_positions(const ca_torch_sdpa *call, int64_t L, int64_t *first, int64_t *last,
                ca_error *error)
{
    const ca_tensor *offsets = &call->offsets;
    int64_t count = offsets->data != NULL ? offsets->shape[0] : 1;
    *first = INT64_MAX;
    *last = INT64_MIN;
    for (int64_t b = 0; b < count; b++) {
        int64_t offset = offsets->data != NULL
                             ? ((const int64_t *)offsets->data)[b * offsets->strides[0]]
                             : call->position;
        if (offset < -HIGHEST_POSITION || offset > HIGHEST_POSITION - L) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "query_offset has the number %lld; expected %d to %lld for %lld "
                                "rows with score_mod, mask_mod or block_mask",
                                (long long)offset, -HIGHEST_POSITION,
                                (long long)(HIGHEST_POSITION - L), (long long)L);
        }
        *first = offset < *first ? offset : *first;
        *last = offset + L - 1 > *last ? offset + L - 1 : *last;
    }
    return CA_OK;
}

/* View a mask's blocks (B, H, …) with the dimensions before the heads of a result of ndim
   dimensions. Mods number the entries of all these dimensions, and so does B, unless it is 1. */
static ca_tensor
spread_blocks(const ca_tensor *entries, int ndim, const int64_t *shape)
{
    ca_tensor view;
    int64_t stride = entries->shape[0] == 1 ? 0 : entries->strides[0];
    ca_tensor_start_view(entries, &view);
    for (int d = 0; d < ndim - 3; d++) {
        int64_t inner = 1;
        for (int next = d + 1; next < ndim - 3; next++) {
            inner *= shape[next];
        }
        ca_tensor_add_dim(&view, stride == 0 ? 1 : shape[d], stride * inner);
    }
    for (int d = 1; d < 4; d++) {
        ca_tensor_add_dim(&view, entries->shape[d], entries->strides[d]);
    }
    return view;
}

/* The entries are those of the mask's rows and keys: the caller may have changed either. */
static ca_status
check_entries(const ca_blocks *blocks, ca_error *error)
{
    const ca_tensor *entries = &blocks->entries;
    const int64_t sizes[] = {blocks->block_rows, blocks->block_keys};
    const int64_t lengths[] = {blocks->rows, blocks->keys};
    int64_t counts[2];
    for (int n = 0; n < 2; n++) {
        if (sizes[n] < 1 || sizes[n] > HIGHEST_POSITION) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "block_mask has a BLOCK_SIZE of %lld; expected 1 to %d",
                                (long long)sizes[n], HIGHEST_POSITION);
        }
        counts[n] = lengths[n] / sizes[n] + (lengths[n] % sizes[n] != 0);
    }
    if (entries->dtype == CA_UINT8 && entries->ndim == 4 && entries->shape[2] == counts[0] &&
        entries->shape[3] == counts[1]) {
        return CA_OK;
    }
    return ca_error_set(error, CA_ERROR_VALUE,
                        "block_mask has entries of dtype %s and shape %s; expected uint8 and "
                        "(B, H, %lld, %lld), for blocks of %lld rows and %lld keys",
                        ca_dtype_name(entries->dtype), CA_SHAPE_OF(entries), (long long)counts[0],
                        (long long)counts[1], (long long)sizes[0], (long long)sizes[1]);
}

/* A mask's blocks have all keys, all positions of rows, and the leading dimensions or 1. */
static ca_status
check_blocks(const ca_torch_sdpa *call, int ndim, const int64_t *shape, int64_t first, int64_t last,
             ca_error *error)
{
    const ca_blocks *blocks = &call->blocks;
    int64_t keys = ca_tensor_size(&call->key, 2);
    int64_t B = 1;
    int64_t Hq = ndim >= 3 ? shape[ndim - 3] : 1;
    for (int d = 0; d < ndim - 3; d++) {
        B *= shape[d];
    }
    if (blocks->keys < keys || first < 0 || last >= blocks->rows) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "block_mask is for positions 0 to %lld of queries and %lld keys; "
                            "expected positions %lld to %lld and %lld keys",
                            (long long)blocks->rows - 1, (long long)blocks->keys, (long long)first,
                            (long long)last, (long long)keys);
    }
    ca_status status = check_entries(blocks, error);
    if (status != CA_OK) {
        return status;
    }
    int64_t given[] = {blocks->entries.shape[0], blocks->entries.shape[1]};
    int64_t expected[] = {B, Hq};
    if ((given[0] != 1 && given[0] != B) || (given[1] != 1 && given[1] != Hq)) {
        return ca_error_set(
            error, CA_ERROR_VALUE,
            "block_mask has B %lld and H %lld; expected %lld and %lld, or 1 (None): "
            "the result has shape %s",
            (long long)given[0], (long long)given[1], (long long)B, (long long)Hq,
            CA_SHAPE_WORDS(ndim, shape));
    }
    for (int n = 0; n < 2; n++) {
        if (blocks->uses[n] && given[n] < expected[n]) {
            return ca_error_set(error, CA_ERROR_VALUE,
                                "block_mask has %c 1 (None), but its mask_mod uses %c; expected "
                                "create_block_mask with %c=%lld, a mask for each",
                                "BH"[n], "bh"[n], "BH"[n], (long long)expected[n]);
        }
    }
    return CA_OK;
}

/* A kernel takes CA_OPTIONAL_VIEWS arrays: int4 needs most of them. */
static ca_status
check_arrays_of_mods(const ca_torch_sdpa *call, ca_error *error)
{
    const ca_tensor *others[] = {&call->attn_mask,    &call->sinks,         &call->offsets,
                                 &call->key_scale,    &call->value_scale,   &call->key_offset,
                                 &call->value_offset, &call->blocks.entries};
    int most = CA_OPTIONAL_VIEWS - 1 - (call->sequences != NULL); /* the numbers of mods */
    int tables = 0;
    for (size_t n = 0; n < sizeof others / sizeof others[0]; n++) {
        most -= others[n]->data != NULL;
    }
    while (tables < CA_TABLES && call->mods->tables[tables].data != NULL) {
        tables++;
    }
    return tables <= most ? CA_OK
                          : ca_error_set(error, CA_ERROR_VALUE,
                                         "the score_mod and mask_mod read %d arrays; expected at "
                                         "most %d in such a call",
                                         tables, most);
}

static ca_status
check_mods(const ca_torch_sdpa *call, int ndim, const int64_t *shape, ca_error *error)
{
    ca_status status = CA_OK;
    int64_t L = shape[ndim - 2];
    int64_t S = /* a sequence may have more keys than its first page, and fewer than all */
        call->sequences != NULL ? call->sequences->most_keys : ca_tensor_size(&call->key, 2);
    int64_t first;
    int64_t last;
    if (L > HIGHEST_POSITION || S > HIGHEST_POSITION) {
        CA_TRY(ca_error_set(error, CA_ERROR_VALUE,
                            "query has %lld rows and key has %lld; expected at most %d with "
                            "score_mod, mask_mod or block_mask",
                            (long long)L, (long long)S, HIGHEST_POSITION));
    }
    CA_TRY(check_arrays_of_mods(call, error));
    CA_TRY(check_positions(call, L, &first, &last, error));
    if (call->blocks.entries.data != NULL && L > 0) {
        CA_TRY(check_blocks(call, ndim, shape, first, last, error));
    }
done:
    return status;
}

static ca_status
check_scalars(const ca_torch_sdpa *call, ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(ca_door_check_scale(call->has_scale, call->scale, call->query.dtype, error));
    CA_TRY(ca_door_check_softcap(call->softcap, error));
    if (call->window_left < 0 || call->window_right < 0) {
        CA_TRY(ca_error_set(
            error, CA_ERROR_VALUE, "window has the bound %lld; expected 0 or more, or None",
            (long long)(call->window_left < 0 ? call->window_left : call->window_right)));
    }
done:
    return status;
}

/* `shape` is the result's, of ndim sizes. */
static ca_status
check_sinks(const ca_tensor *sinks, int ndim, const int64_t *shape, ca_error *error)
{
    int64_t Hq = ndim >= 3 ? shape[ndim - 3] : 1;
    if (sinks->data != NULL && (sinks->ndim != 1 || sinks->shape[0] != Hq)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "sinks has shape %s; expected (%lld,), one for each query head",
                            CA_SHAPE_OF(sinks), (long long)Hq);
    }
    return CA_OK;
}

static ca_status
check_offsets(const ca_torch_sdpa *call, ca_error *error)
{
    const ca_tensor *query = &call->query;
    if (call->offsets.data == NULL) {
        return CA_OK;
    }
    if (query->ndim < 4) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "query_offset has shape %s; expected an int for a query of shape %s, "
                            "which has less than four dimensions",
                            CA_SHAPE_OF(&call->offsets), CA_SHAPE_OF(query));
    }
    if (call->offsets.shape[0] != query->shape[0]) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "query_offset has shape %s; expected an int or (%lld,), one for each "
                            "entry of the first dimension of query (shape %s)",
                            CA_SHAPE_OF(&call->offsets), (long long)query->shape[0],
                            CA_SHAPE_OF(query));
    }
    return CA_OK;
}

/* Keys and values have query's dtype, or are bytes that stand for numbers. */
static ca_status
check_dtypes(const ca_torch_sdpa *call, ca_error *error)
{
    ca_dtype code = call->code != 0 ? CA_UINT8 : CA_INT8;
    if (call->key.dtype != CA_INT8 && call->code == 0) {
        return ca_door_check_dtypes(&call->query, &call->key, &call->value, error);
    }
    return call->key.dtype == code && call->value.dtype == code
               ? CA_OK
               : ca_error_set(error, CA_ERROR_TYPE,
                              "key has dtype %s and value has dtype %s; "
                              "expected both to have one dtype",
                              ca_dtype_name(call->key.dtype), ca_dtype_name(call->value.dtype));
}

ca_status
ca_torch_sdpa_check(const ca_torch_sdpa *call, int *ndim, int64_t shape[CA_MAX_DIMS],
                    ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(check_dtypes(call, error));
    CA_TRY(ca_door_check_matrices(&call->query, &call->key, &call->value, 2, error));
    CA_TRY(check_scalars(call, error));

    int n = call->query.ndim;
    n = call->key.ndim > n ? call->key.ndim : n;
    n = call->value.ndim > n ? call->value.ndim : n;
    for (int d = 0; d < n; d++) {
        shape[d] = 1;
    }
    int first = 3; /* from the end: the first dimension that broadcasts */
    if (call->enable_gqa) {
        CA_TRY(check_heads(call, error));
        first = 4;
        if (n >= 3) {
            shape[n - 3] = ca_tensor_size(&call->query, 3);
        }
    }
    CA_TRY(broadcast_leading(&call->query, "query", first, n, shape, error));
    CA_TRY(broadcast_leading(&call->key, "key", first, n, shape, error));
    CA_TRY(broadcast_leading(&call->value, "value", first, n, shape, error));
    shape[n - 2] = ca_tensor_size(&call->query, 2);
    shape[n - 1] = ca_tensor_size(&call->value, 1);
    *ndim = n;
    if (call->has_mask) {
        CA_TRY(check_mask(&call->attn_mask, n, shape, ca_tensor_size(&call->key, 2), error));
    }
    CA_TRY(check_sinks(&call->sinks, n, shape, error));
    CA_TRY(check_offsets(call, error));
    if (call->mods != NULL) {
        CA_TRY(check_mods(call, n, shape, error));
    }
    int64_t count;
    CA_TRY(ca_shape_count(n, shape, "the result", &count, error));
    if (call->returns_weights) {
        int64_t weights[CA_MAX_DIMS];
        memcpy(weights, shape, (size_t)n * sizeof(*shape));
        weights[n - 1] = ca_tensor_size(&call->key, 2);
        CA_TRY(ca_shape_count(n, weights, "the weights", &count, error));
    }
done:
    return status;
}

/* Set mods, the numbers of the call that they read, and the blocks of their mask. */
static void
set_mods(const ca_torch_sdpa *call, const ca_tensor *output, int64_t Hk, ca_attention *attention,
         ca_tensor views[CA_ATTENTION_OPERANDS])
{
    int64_t *numbers = call->mods->numbers;
    int nleading = output->ndim - 2;
    ca_tensor *blocks = &views[CA_ATTENTION_BLOCKS];
    numbers[CA_NUMBER_OF_ROWS] = ca_tensor_size(output, 2) > 0 ? ca_tensor_size(output, 2) : 1;
    numbers[CA_NUMBER_OF_HEADS] = ca_tensor_size(output, 3) > 0 ? ca_tensor_size(output, 3) : 1;
    numbers[CA_NUMBER_OF_POSITION] = call->position;
    numbers[CA_NUMBER_OF_BLOCK_ROWS] = call->blocks.block_rows;
    numbers[CA_NUMBER_OF_BLOCK_KEYS] = call->blocks.block_keys;
    attention->mods = call->mods;
    if (call->blocks.entries.data == NULL) {
        return;
    }
    const ca_tensor entries = spread_blocks(&call->blocks.entries, output->ndim, output->shape);
    ca_door_view_grouped(&entries, 2, nleading, output->shape, Hk, blocks);
}

void
ca_torch_convert_sinks(const ca_tensor *sinks, ca_tensor *converted)
{
    for (int64_t h = 0; h < sinks->shape[0]; h++) {
        ca_tensor one = *sinks;
        ca_tensor_take(&one, 0, h, 1);
        double sink = ca_tensor_first_number(&one);
        sink = sink == INFINITY ? NAN : sink;
        if (converted->dtype == CA_FLOAT64) {
            ((double *)converted->data)[h] = sink;
        } else {
            bool low = isfinite(sink) && sink < -FLT_MAX;
            ((float *)converted->data)[h] = sink > FLT_MAX ? FLT_MAX : low ? -FLT_MAX : (float)sink;
        }
    }
}

/* View offsets, one for each entry of the first dimension of a query of ndim dimensions, as those of
   all heads. */
static ca_tensor
spread_offsets(const ca_tensor *offsets, int ndim)
{
    ca_tensor view;
    ca_tensor_start_view(offsets, &view);
    ca_tensor_add_dim(&view, offsets->shape[0], offsets->strides[0]);
    while (view.ndim < ndim - 2) {
        ca_tensor_add_dim(&view, 1, 0);
    }
    return view;
}

void
ca_torch_sdpa_views(const ca_torch_sdpa *call, const ca_tensor *output, const ca_tensor *lse,
                    const ca_tensor *weights, ca_attention *attention,
                    ca_tensor views[CA_ATTENTION_OPERANDS])
{
    int nleading = output->ndim - 2;
    const int64_t *shape = output->shape;
    int64_t Hq = ca_tensor_size(output, 3);
    int64_t Hk = call->enable_gqa ? ca_tensor_size(&call->key, 3) : Hq;
    int64_t L = ca_tensor_size(&call->query, 2);
    int64_t S = ca_tensor_size(&call->key, 2);
    int64_t E = ca_tensor_size(&call->query, 1);
    ca_tensor spread;
    const ca_tensor *offsets = &call->offsets;
    if (offsets->data != NULL) {
        spread = spread_offsets(offsets, call->query.ndim);
        offsets = &spread;
    }
    const struct {
        const ca_tensor *tensor;
        int trailing;
        ca_attention_role role;
    } operands[] = {
        {&call->query, 2, CA_ATTENTION_QUERY},
        {&call->key, 2, CA_ATTENTION_KEY},
        {&call->value, 2, CA_ATTENTION_VALUE},
        {&call->attn_mask, 2, CA_ATTENTION_MASK},
        {output, 2, CA_ATTENTION_OUTPUT},
        {lse, 2, CA_ATTENTION_LSE},
        {weights, 2, CA_ATTENTION_SCORES},
        {&call->sinks, 0, CA_ATTENTION_SINKS},
        {offsets, 0, CA_ATTENTION_OFFSETS},
        {&call->key_scale, 2, CA_ATTENTION_KEY_SCALE},
        {&call->value_scale, 2, CA_ATTENTION_VALUE_SCALE},
        {&call->key_offset, 2, CA_ATTENTION_KEY_OFFSET},
        {&call->value_offset, 2, CA_ATTENTION_VALUE_OFFSET},
    };

    ca_attention_init(attention, views);
    for (size_t i = 0; i < sizeof(operands) / sizeof(operands[0]); i++) {
        ca_door_view_grouped(operands[i].tensor, operands[i].trailing, nleading, shape, Hk,
                             &views[operands[i].role]);
    }
    ca_tensor *mask = &views[CA_ATTENTION_MASK];
    ca_door_broadcast_dim(mask, 2, L);
    ca_door_broadcast_dim(mask, 1, S);
    attention->mask_is_added = mask->dtype != CA_BOOL;
    attention->scale = call->has_scale ? call->scale : ca_door_default_scale(E);
    attention->softcap = call->softcap;
    attention->dropout = call->dropout;
    attention->seed = call->seed;
    if (call->mods != NULL) {
        set_mods(call, output, Hk, attention, views);
    }

    attention->stage = CA_SCORES_WEIGHTS;
    attention->sequences = call->sequences;
    attention->code = call->code;

    int64_t shift =
        ca_door_add_places(call->causal == CA_CAUSAL_LOWER_RIGHT ? S - L : 0, call->position);
    ca_door_set_band(attention, call->window_left, call->window_right,
                     call->causal != CA_CAUSAL_NONE, shift);
}
