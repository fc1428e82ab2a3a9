/* SPDX-License-Identifier: MIT */
#include "attention/problem.h"

#include <float.h>
#include <math.h>

#include "base/fold.h"

#define OPERANDS CA_ATTENTION_OPERANDS

_Static_assert(OPERANDS <= CA_FOLD_TENSORS, "all operands are folded together, and have a bit");
_Static_assert(CA_OPTIONAL_ROLES <= CA_OPTION_ADDED_MASK, "each optional operand has a bit");

/* The rows of kernels/attention/operands.h. */
static const struct {
    int dimensions; /* behind the leading ones */
    unsigned traits;
    const char *name;
} operand_rows[] = {
#define ROW(role, member, element, dimensions, traits, name)                                       \
    [CA_ATTENTION_##role] = {dimensions, traits, name},
    CA_OWN_OPERANDS(ROW) CA_OPTIONAL_OPERANDS(ROW) CA_MOD_OPERANDS(ROW) CA_BACKWARD_OPERANDS(ROW)
        CA_GRADIENT_OPERANDS(ROW)
#undef ROW
};

const ca_attention_role ca_paged_roles[CA_PAGED_OPERANDS] = {
    CA_ATTENTION_KEY,         CA_ATTENTION_VALUE,      CA_ATTENTION_KEY_SCALE,
    CA_ATTENTION_VALUE_SCALE, CA_ATTENTION_KEY_OFFSET, CA_ATTENTION_VALUE_OFFSET,
};

static bool
has_trait(ca_attention_role role, unsigned trait)
{
    return (operand_rows[role].traits & trait) != 0;
}

void
ca_attention_init(ca_attention *attention, ca_tensor views[OPERANDS])
{
    for (int role = 0; role < OPERANDS; role++) {
        ca_tensor_set_absent(&views[role]);
    }
    attention->mask_is_added = false;
    attention->filter = -INFINITY;
    attention->below = CA_BAND_UNBOUNDED;
    attention->above = CA_BAND_UNBOUNDED;
    attention->band_follows_counts = false;
    attention->scale = 1;
    attention->softcap = 0;
    attention->mask_before_softcap = false;
    attention->dropout = 0;
    attention->seed = 0;
    attention->in_float64 = false;
    attention->mods = NULL;
    attention->stage = CA_SCORES_SCALED;
    attention->repeated = 0;
    attention->call = "attention";
    attention->inputs = attention->scored = NULL;
    attention->sequences = NULL;
    attention->code = 0;
}

/* ---- folding ---- */

static ca_extent
extent_of(const ca_operand *operand, const int64_t batch[CA_BATCH_DIMS])
{
    const int64_t sizes[] = {batch[0], batch[1], batch[2], operand->rows, operand->columns};
    const int64_t strides[] = {operand->batch[0], operand->batch[1], operand->batch[2],
                               operand->row_stride, operand->column_stride};
    int64_t below = 0; /* elements before and after element [0, 0, …] */
    int64_t above = 0;
    if (operand->data == NULL) {
        return (ca_extent){0};
    }
    for (int d = 0; d < CA_BATCH_DIMS + 2; d++) {
        if (sizes[d] == 0) {
            return (ca_extent){.data = operand->data};
        }
        int64_t reach = (sizes[d] - 1) * strides[d];
        *(reach < 0 ? &below : &above) += reach;
    }
    int64_t size = (int64_t)ca_dtype_size(operand->dtype);
    return (ca_extent){.data = (char *)operand->data + below * size,
                       .bytes = (size_t)((above - below + 1) * size),
                       .offset = -below};
}

/* A launch binds the whole storage of an operand that a device holds. */
static void
find_memory(ca_operand *operand, const int64_t batch[CA_BATCH_DIMS])
{
    operand->memory = extent_of(operand, batch);
    if (operand->block != NULL && operand->memory.bytes != 0) {
        ptrdiff_t before = (char *)operand->data - (char *)operand->block->address;
        operand->memory = (ca_extent){
            .data = operand->block->address,
            .bytes = operand->block->bytes,
            .offset = before / (ptrdiff_t)ca_dtype_size(operand->dtype),
        };
    }
}

/* Set an operand, but for its memory: a view whose leading dimensions are folded, and which
   begins `offset` elements later. */
static void
set_operand(ca_operand *operand, const ca_tensor *view, ca_attention_role role, int64_t offset,
            const ca_leading_dims *dims)
{
    ptrdiff_t size = (ptrdiff_t)ca_dtype_size(view->dtype);
    int trailing = operand_rows[role].dimensions;
    operand->dtype = view->dtype;
    operand->data = (char *)view->data + offset * size;
    operand->block = view->block;
    operand->rows = 1;
    operand->columns = 1;
    if (trailing >= 1) {
        operand->rows = view->shape[view->ndim - trailing];
        operand->row_stride = view->strides[view->ndim - trailing];
    }
    if (trailing == 2) {
        operand->columns = view->shape[view->ndim - 1];
        operand->column_stride = view->strides[view->ndim - 1];
    }
    ca_fold_strides(dims, (int)role, operand->batch);
}

/* A table's strides take the places of batch strides, rows and columns, in this order. */
void
ca_attention_set_mods(ca_attention *attention, const ca_mods *mods)
{
    static const int64_t one[CA_BATCH_DIMS] = {1, 1, 1};
    attention->mods = mods;
    attention->operands[CA_ATTENTION_NUMBERS] = (ca_operand){.dtype = CA_INT64,
                                                             .data = (void *)mods->numbers,
                                                             .rows = mods->count,
                                                             .columns = 1,
                                                             .row_stride = 1};
    find_memory(&attention->operands[CA_ATTENTION_NUMBERS], one);
    for (int t = 0; t < CA_TABLES && mods->tables[t].data != NULL; t++) {
        const ca_tensor *table = &mods->tables[t];
        ca_operand *operand = &attention->operands[CA_ATTENTION_TABLE0 + t];
        int64_t sizes[CA_TABLE_DIMS] = {1, 1, 1, 1, 1};
        int64_t strides[CA_TABLE_DIMS] = {0};
        for (int d = 0; d < table->ndim; d++) {
            sizes[d] = table->shape[d];
            strides[d] = table->strides[d];
        }
        *operand = (ca_operand){.dtype = table->dtype,
                                .data = table->data,
                                .block = table->block,
                                .batch = {strides[0], strides[1], strides[2]},
                                .rows = sizes[3],
                                .columns = sizes[4],
                                .row_stride = strides[3],
                                .column_stride = strides[4]};
        find_memory(operand, sizes);
    }
}

void
ca_attention_set_output(ca_attention *attention, const ca_tensor *output)
{
    ca_operand *operand = &attention->operands[CA_ATTENTION_OUTPUT];
    const int first = output->ndim - CA_BATCH_DIMS - 2; /* below 0: dimensions are missing */
    *operand = (ca_operand){.dtype = output->dtype, .data = output->data, .block = output->block};
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        operand->batch[d] = first + d >= 0 ? output->strides[first + d] : 0;
    }
    operand->rows = output->shape[output->ndim - 2];
    operand->columns = output->shape[output->ndim - 1];
    operand->row_stride = output->strides[output->ndim - 2];
    operand->column_stride = output->strides[output->ndim - 1];
    find_memory(operand, attention->batch);
}

/* Remove folded dimensions until CA_BATCH_DIMS are left: the smallest ones, or the outermost
   ones with dropout and mods, which number rows in order. `offsets` become where
   problem `index` begins in each view, and *repeated a bit for each view whose elements an earlier problem
   has had. Returns the number of problems. */
static int64_t
separate(ca_leading_dims *dims, bool in_order, int64_t index, int64_t offsets[OPERANDS],
         uint64_t *repeated)
{
    int64_t count = 1;
    bool empty = false;
    while (dims->count > CA_BATCH_DIMS) {
        int smallest = ca_smallest_dimension(dims->size, dims->count);
        int d = in_order || smallest < 0 ? dims->count - CA_BATCH_DIMS - 1 : smallest;
        int64_t size = dims->size[d];
        empty = empty || size == 0;
        for (int role = 0; role < OPERANDS && !empty; role++) {
            int64_t stride = dims->stride[d][role];
            offsets[role] += index % size * stride;
            *repeated |= (uint64_t)(stride == 0 && index % size > 0) << role;
        }
        index = empty ? 0 : index / size;
        count = empty ? 1 : count * size;
        ca_fold_remove(dims, d);
    }
    if (empty) { /* one problem, in which nothing is computed */
        dims->size[0] = 0;
    }
    return count;
}

/* A sequence has fewer keys than there are, or keys in several pages. */
static void
set_keys_of_sequences(ca_attention *attention)
{
    const ca_sequences *sequences = attention->sequences;
    attention->S = attention->T = sequences->most_keys;
    for (int n = 0; n < CA_PAGED_OPERANDS; n++) {
        if (sequences->paged[n] != NULL) {
            attention->operands[ca_paged_roles[n]].memory = ca_tensor_memory(sequences->paged[n]);
        }
    }
}

int64_t
ca_attention_fold(ca_attention *attention, const ca_tensor views[OPERANDS], int64_t index)
{
    const ca_tensor *output = &views[CA_ATTENTION_OUTPUT];
    ca_operand *operands = attention->operands;
    int64_t offsets[OPERANDS] = {0};
    ca_leading_dims dims;
    ca_fold_leading(views, OPERANDS, output->ndim - 2, output->shape, &dims);
    bool in_order = ca_attention_drops(attention) || attention->mods != NULL;
    attention->repeated = 0;
    int64_t count = separate(&dims, in_order, index, offsets, &attention->repeated);
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        attention->batch[d] = 1;
    }
    ca_fold_sizes(&dims, attention->batch);
    for (int role = 0; role < OPERANDS; role++) {
        operands[role] = (ca_operand){.dtype = CA_FLOAT32};
        if (views[role].data != NULL) {
            set_operand(&operands[role], &views[role], (ca_attention_role)role, offsets[role],
                        &dims);
            find_memory(&operands[role], attention->batch);
        }
    }
    if (attention->mods != NULL) {
        ca_attention_set_mods(attention, attention->mods);
    }
    attention->L = operands[CA_ATTENTION_QUERY].rows;
    attention->E = operands[CA_ATTENTION_QUERY].columns;
    attention->S = operands[CA_ATTENTION_KEY].rows;
    attention->Ev = operands[CA_ATTENTION_VALUE].columns;
    attention->P = operands[CA_ATTENTION_PAST_KEY].rows;
    attention->T = attention->P + attention->S;
    if (attention->sequences != NULL) {
        set_keys_of_sequences(attention);
    }
    attention->first_row =
        index * attention->batch[0] * attention->batch[1] * attention->batch[2] * attention->L;
    return count;
}

void
ca_attention_take(ca_attention *attention, int d, int64_t first, int64_t count)
{
    bool rows = d == CA_BATCH_DIMS;
    int64_t rows_before = first; /* and those of a whole entry of dimension d */
    for (int inner = d + 1; inner <= CA_BATCH_DIMS; inner++) {
        rows_before *= inner < CA_BATCH_DIMS ? attention->batch[inner] : attention->L;
    }
    attention->first_row += rows_before;
    *(rows ? &attention->L : &attention->batch[d]) = count;
    for (int role = 0; role < OPERANDS; role++) {
        ca_operand *operand = &attention->operands[role];
        if (operand->data == NULL || has_trait(role, CA_IS_WHOLE)) {
            continue;
        }
        if (!rows || has_trait(role, CA_IS_BY_ROWS)) {
            int64_t stride = rows ? operand->row_stride : operand->batch[d];
            operand->data =
                (char *)operand->data + first * stride * (int64_t)ca_dtype_size(operand->dtype);
            operand->rows = rows ? count : operand->rows;
        }
        find_memory(operand, attention->batch);
    }
    if (rows && attention->below != CA_BAND_UNBOUNDED) {
        attention->below -= first;
    }
    if (rows && attention->above != CA_BAND_UNBOUNDED) {
        attention->above += first;
    }
}

void
ca_attention_remove(ca_attention *attention, ca_attention_role role)
{
    attention->operands[role] = (ca_operand){.dtype = CA_FLOAT32};
}

ca_extent
ca_attention_extent(const ca_attention *attention, ca_attention_role role)
{
    return extent_of(&attention->operands[role], attention->batch);
}

/* ---- questions that plans ask ---- */

bool
ca_attention_has_codes(const ca_attention *attention)
{
    ca_dtype dtype = attention->operands[CA_ATTENTION_KEY].dtype;
    return dtype == CA_INT8 || dtype == CA_UINT8;
}

int64_t
ca_attention_page_size(const ca_attention *attention)
{
    return attention->sequences != NULL ? attention->sequences->page_size : 0;
}

bool
ca_attention_has_pages(const ca_attention *attention)
{
    return ca_attention_page_size(attention) > 0;
}

bool
ca_attention_has(const ca_attention *attention, ca_attention_role role)
{
    return attention->operands[role].data != NULL;
}

bool
ca_attention_is_result(ca_attention_role role)
{
    return has_trait(role, CA_IS_RESULT);
}

const char *
ca_attention_name(ca_attention_role role)
{
    return operand_rows[role].name;
}

bool
ca_attention_in_float64(const ca_attention *attention)
{
    return attention->in_float64 || attention->operands[CA_ATTENTION_QUERY].dtype == CA_FLOAT64 ||
           attention->operands[CA_ATTENTION_VALUE].dtype == CA_FLOAT64;
}

double
ca_attention_softcap(const ca_attention *attention)
{
    double softcap = attention->softcap;
    if (ca_attention_in_float64(attention) || softcap == 0) {
        return softcap;
    }
    return softcap > FLT_MAX / 64 ? 0 : softcap < FLT_MIN ? FLT_MIN : softcap;
}

bool
ca_attention_caps_last(const ca_attention *attention)
{
    return attention->mask_before_softcap && ca_attention_softcap(attention) > 0;
}

bool
ca_attention_drops(const ca_attention *attention)
{
    return nearbyint(ldexp(attention->dropout, 32)) >= 1;
}

bool
ca_attention_keys_are(const ca_attention *attention, bool (*test)(const ca_operand *))
{
    const ca_operand *operands = attention->operands;
    return test(&operands[CA_ATTENTION_KEY]) && test(&operands[CA_ATTENTION_VALUE]) &&
           test(&operands[CA_ATTENTION_PAST_KEY]) && test(&operands[CA_ATTENTION_PAST_VALUE]);
}

int64_t
ca_attention_key_bytes(const ca_attention *attention)
{
    const ca_operand *operands = attention->operands;
    return attention->E * (int64_t)ca_dtype_size(operands[CA_ATTENTION_KEY].dtype) +
           attention->Ev * (int64_t)ca_dtype_size(operands[CA_ATTENTION_VALUE].dtype);
}

int64_t
ca_attention_visible_keys(const ca_attention *attention)
{
    int64_t T = attention->T;
    if (attention->below >= T || attention->above >= T) {
        return T;
    }
    int64_t band = attention->below + attention->above + attention->L;
    return band < 0 ? 0 : band < T ? band : T;
}

bool
ca_attention_keys_exceed(const ca_attention *attention, bool all, int64_t bytes)
{
    double read =
        (double)ca_attention_visible_keys(attention) * (double)ca_attention_key_bytes(attention);
    for (int d = 0; all && d < CA_BATCH_DIMS; d++) {
        bool own = attention->operands[CA_ATTENTION_KEY].batch[d] != 0;
        read *= own ? (double)attention->batch[d] : 1;
    }
    return read > (double)bytes;
}

static bool
heads_share(const ca_operand *operand)
{
    return operand->batch[CA_BATCH_DIMS - 1] == 0;
}

int64_t
ca_attention_heads_together(const ca_attention *attention)
{
    const ca_operand *operands = attention->operands;
    const int last = CA_BATCH_DIMS - 1;
    if (!ca_attention_keys_are(attention, heads_share) ||
        !heads_share(&operands[CA_ATTENTION_KEY_COUNTS]) ||
        !heads_share(&operands[CA_ATTENTION_OFFSETS])) {
        return 1;
    }
    if (attention->mods != NULL) {
        /* The rows of mods that are computed together belong to one entry of the batch. */
        const int64_t *numbers = attention->mods->numbers;
        int64_t heads = numbers[CA_NUMBER_OF_HEADS];
        int64_t first = attention->first_row / numbers[CA_NUMBER_OF_ROWS] % heads;
        return first + attention->batch[last] > heads ? 1 : attention->batch[last];
    }
    return attention->batch[last];
}

bool
ca_operand_has_rows(const ca_operand *operand)
{
    return operand->data != NULL && operand->rows > 0;
}

bool
ca_operand_rows_contiguous(const ca_operand *operand)
{
    return !ca_operand_has_rows(operand) || operand->columns == 1 || operand->column_stride == 1;
}

bool
ca_operand_rows_hold(const ca_operand *operand, int64_t columns)
{
    return !ca_operand_has_rows(operand) ||
           (operand->columns >= columns && ca_operand_rows_contiguous(operand));
}

bool
ca_operand_rows_adjoin(const ca_operand *operand)
{
    return ca_operand_rows_contiguous(operand) &&
           (!ca_operand_has_rows(operand) || operand->rows == 1 ||
            operand->row_stride == operand->columns);
}

bool
ca_operand_is_wide(const ca_operand *operand)
{
    int64_t size = (int64_t)ca_dtype_size(operand->dtype);
    if (!ca_operand_has_rows(operand)) {
        return true;
    }
    /* A device's buffer begins at the first byte of the memory that is bound. */
    bool wide = ca_operand_rows_contiguous(operand) &&
                (uintptr_t)operand->memory.data % CA_WIDE_BYTES == 0 &&
                operand->memory.offset * size % CA_WIDE_BYTES == 0 &&
                operand->columns * size % CA_WIDE_BYTES == 0 &&
                operand->row_stride * size % CA_WIDE_BYTES == 0;
    for (int d = 0; d < CA_BATCH_DIMS; d++) {
        wide = wide && operand->batch[d] * size % CA_WIDE_BYTES == 0;
    }
    return wide;
}

bool
ca_attention_pages_are_wide(const ca_attention *attention)
{
    static const ca_attention_role roles[] = {CA_ATTENTION_KEY, CA_ATTENTION_VALUE};
    bool wide = true;
    for (int n = 0; n < 2 && ca_attention_has_pages(attention); n++) {
        int64_t size = (int64_t)ca_dtype_size(attention->operands[roles[n]].dtype);
        wide = wide && attention->sequences->paged[n]->strides[0] * size % CA_WIDE_BYTES == 0;
    }
    return wide;
}
