/* SPDX-License-Identifier: MIT */
#include "doors/torch_backward.h"

#include "doors/common.h"

/* `shape` is the expected one, of ndim sizes. */
static ca_status
check_result(const ca_tensor *tensor, const char *name, ca_dtype dtype, int ndim,
             const int64_t *shape, ca_error *error)
{
    bool equal = tensor->ndim == ndim;
    for (int d = 0; equal && d < ndim; d++) {
        equal = tensor->shape[d] == shape[d];
    }
    if (tensor->dtype != dtype) {
        return ca_error_set(error, CA_ERROR_TYPE, "%s has dtype %s; expected %s", name,
                            ca_dtype_name(tensor->dtype), ca_dtype_name(dtype));
    }
    if (!equal) {
        return ca_error_set(error, CA_ERROR_VALUE,
                            "%s has shape %s; expected %s, that of what the forward pass gave",
                            name, CA_SHAPE_OF(tensor), CA_SHAPE_WORDS(ndim, shape));
    }
    return CA_OK;
}

ca_status
ca_torch_backward_check(const ca_torch_sdpa *call, const ca_torch_backward *backward, int ndim,
                        const int64_t *shape, ca_error *error)
{
    ca_status status = CA_OK;
    ca_dtype dtype = call->query.dtype;
    ca_dtype wide = dtype == CA_FLOAT64 ? CA_FLOAT64 : CA_FLOAT32;
    CA_TRY(check_result(&backward->grad_output, "grad_output", dtype, ndim, shape, error));
    CA_TRY(check_result(&backward->output, "output", dtype, ndim, shape, error));
    CA_TRY(check_result(&backward->lse, "lse", wide, ndim - 1, shape, error));
    if (backward->grad_lse.data != NULL) {
        CA_TRY(check_result(&backward->grad_lse, "grad_lse", wide, ndim - 1, shape, error));
    }
done:
    return status;
}

void
ca_torch_backward_views(const ca_torch_sdpa *call, const ca_torch_backward *backward,
                        const ca_tensor gradients[CA_GRADIENTS], ca_attention *attention,
                        ca_tensor views[CA_ATTENTION_OPERANDS])
{
    const ca_tensor *output = &backward->output;
    int nleading = output->ndim - 2;
    int64_t Hq = ca_tensor_size(output, 3);
    int64_t Hk = call->enable_gqa ? ca_tensor_size(&call->key, 3) : Hq;
    ca_tensor absent;
    ca_tensor lse = backward->lse;
    ca_tensor grad_lse = backward->grad_lse;
    ca_tensor_set_absent(&absent);
    ca_tensor_add_dim(&lse, 1, 0);
    if (grad_lse.data != NULL) {
        ca_tensor_add_dim(&grad_lse, 1, 0);
    }
    const struct {
        const ca_tensor *tensor;
        int trailing;
        ca_attention_role role;
    } operands[] = {
        {&backward->grad_output, 2, CA_ATTENTION_GRAD_OUTPUT},
        {&lse, 2, CA_ATTENTION_FORWARD_LSE},
        {&grad_lse, 2, CA_ATTENTION_GRAD_LSE},
        {&gradients[CA_GRADIENT_QUERY], 2, CA_ATTENTION_GRAD_QUERY},
        {&gradients[CA_GRADIENT_KEY], 2, CA_ATTENTION_GRAD_KEY},
        {&gradients[CA_GRADIENT_VALUE], 2, CA_ATTENTION_GRAD_VALUE},
        {&gradients[CA_GRADIENT_MASK], 2, CA_ATTENTION_GRAD_MASK},
        {&gradients[CA_GRADIENT_SINKS], 0, CA_ATTENTION_GRAD_SINKS},
    };
    ca_torch_sdpa_views(call, output, &absent, &absent, attention, views);
    for (size_t i = 0; i < sizeof(operands) / sizeof(operands[0]); i++) {
        ca_door_view_grouped(operands[i].tensor, operands[i].trailing, nleading, output->shape, Hk,
                             &views[operands[i].role]);
    }
    ca_door_broadcast_dim(&views[CA_ATTENTION_GRAD_MASK], 2, ca_tensor_size(&call->query, 2));
    ca_door_broadcast_dim(&views[CA_ATTENTION_GRAD_MASK], 1, ca_tensor_size(&call->key, 2));
}
