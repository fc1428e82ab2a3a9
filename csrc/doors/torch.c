/* SPDX-License-Identifier: MIT
 *
 * Torch's door: shapes, broadcasting, grouped heads, causality, windows.
 */
#include "doors/torch.h"

#include <string.h>

#include "doors/common.h"

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

static ca_status
check_mask(const ca_tensor *mask, int ndim, const int64_t *shape, int64_t S, ca_error *error)
{
    int64_t scores[CA_MAX_DIMS];
    ca_tensor view;
    memcpy(scores, shape, (size_t)ndim * sizeof(*scores));
    scores[ndim - 1] = S;
    if (mask->ndim > ndim || !ca_door_broadcast(mask, ndim, scores, &view)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "attn_mask has shape %s; expected one that broadcasts to %s",
                            CA_SHAPE_OF(mask), CA_SHAPE_WORDS(ndim, scores));
    }
    return CA_OK;
}

/* A mask's blocks fit the keys, at least the rows, and the leading dimensions or 1. */
static ca_status
check_blocks(const ca_torch_sdpa *call, int ndim, const int64_t *shape, ca_error *error)
{
    const ca_blocks *blocks = &call->blocks;
    int64_t keys = ca_tensor_size(&call->key, 2);
    int64_t expected[CA_MAX_DIMS];
    ca_tensor view;
    memcpy(expected, shape, (size_t)ndim * sizeof(*expected));
    expected[ndim - 2] = blocks->entries.shape[2];
    expected[ndim - 1] = blocks->entries.shape[3];
    if (blocks->keys != keys || blocks->rows < shape[ndim - 2]) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "block_mask is for %lld rows and %lld keys; expected at least %lld "
                            "rows and %lld keys",
                            (long long)blocks->rows, (long long)blocks->keys,
                            (long long)shape[ndim - 2], (long long)keys);
    }
    if (!ca_door_broadcast(&blocks->entries, ndim, expected, &view)) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "block_mask has B %lld and H %lld; expected numbers that broadcast to "
                            "the leading dimensions of the result %s",
                            (long long)blocks->entries.shape[0],
                            (long long)blocks->entries.shape[1], CA_SHAPE_WORDS(ndim, shape));
    }
    return CA_OK;
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

ca_status
ca_torch_sdpa_check(const ca_torch_sdpa *call, int *ndim, int64_t shape[CA_MAX_DIMS],
                    ca_error *error)
{
    ca_status status = CA_OK;
    CA_TRY(ca_door_check_dtypes(&call->query, &call->key, &call->value, error));
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
    if (call->blocks.entries.data != NULL) {
        CA_TRY(check_blocks(call, n, shape, error));
    }
    int64_t count;
    CA_TRY(ca_shape_count(n, shape, "the result", &count, error));
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
    numbers[CA_NUMBER_OF_POSITION] = 0;
    numbers[CA_NUMBER_OF_BLOCK_ROWS] = call->blocks.size;
    numbers[CA_NUMBER_OF_BLOCK_KEYS] = call->blocks.size;
    attention->mods = call->mods;
    ca_door_view_grouped(&call->blocks.entries, 2, nleading, output->shape, Hk, blocks);
}

void
ca_torch_sdpa_views(const ca_torch_sdpa *call, const ca_tensor *output, const ca_tensor *lse,
                    ca_attention *attention, ca_tensor views[CA_ATTENTION_OPERANDS])
{
    int nleading = output->ndim - 2;
    const int64_t *shape = output->shape;
    int64_t Hq = ca_tensor_size(output, 3);
    int64_t Hk = call->enable_gqa ? ca_tensor_size(&call->key, 3) : Hq;
    int64_t L = ca_tensor_size(&call->query, 2);
    int64_t S = ca_tensor_size(&call->key, 2);
    int64_t E = ca_tensor_size(&call->query, 1);
    const struct {
        const ca_tensor *tensor;
        int trailing;
        ca_attention_role role;
    } operands[] = {
        {&call->query, 2, CA_ATTENTION_QUERY}, {&call->key, 2, CA_ATTENTION_KEY},
        {&call->value, 2, CA_ATTENTION_VALUE}, {&call->attn_mask, 2, CA_ATTENTION_MASK},
        {output, 2, CA_ATTENTION_OUTPUT},      {lse, 1, CA_ATTENTION_LSE},
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

    int64_t shift = call->causal == CA_CAUSAL_LOWER_RIGHT ? S - L : 0;
    ca_door_set_band(attention, call->window_left, call->window_right,
                     call->causal != CA_CAUSAL_NONE, shift);
}
