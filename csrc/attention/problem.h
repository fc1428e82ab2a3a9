/* SPDX-License-Identifier: MIT
 *
 * The attention problem that every door fills in. Nothing here knows a specification's
 * name.
 */
#ifndef CLATTN_ATTENTION_PROBLEM_H
#define CLATTN_ATTENTION_PROBLEM_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/mods.h"
#include "base/tensor.h"
#include "kernels/attention/operands.h"
#include "kernels/support/view_params.h" /* CA_BATCH_DIMS */

/* An unbounded side of the band of keys. */
#define CA_BAND_UNBOUNDED INT64_MAX

/* The operands of a problem: kernels/attention/operands.h. */
#define CA_ROLE_OF(role, member, element, dimensions, traits, name) CA_ATTENTION_##role,
typedef enum {
    CA_OWN_OPERANDS(CA_ROLE_OF) CA_OPTIONAL_OPERANDS(CA_ROLE_OF) CA_MOD_OPERANDS(CA_ROLE_OF)
        CA_BACKWARD_OPERANDS(CA_ROLE_OF) CA_GRADIENT_OPERANDS(CA_ROLE_OF) CA_ATTENTION_OPERANDS,
    CA_ATTENTION_OPTIONAL_END = CA_ATTENTION_GRAD_MASK,
    CA_ATTENTION_FIRST_OPTIONAL = CA_ATTENTION_OPTIONAL_END - CA_OPTIONAL_ROLES,
} ca_attention_role;
#undef CA_ROLE_OF

/* One array of a problem. Strides count elements. */
typedef struct {
    ca_dtype dtype;
    void *data;                   /* element [0, 0, 0, 0, 0]; NULL: the operand is absent */
    ca_block *block;              /* the storage that holds it; NULL: host memory */
    int64_t batch[CA_BATCH_DIMS]; /* strides of the leading dimensions */
    int64_t rows;                 /* sizes and strides of the last two dimensions */
    int64_t columns;
    int64_t row_stride;
    int64_t column_stride;
    ca_extent memory; /* what a launch binds: all bytes of the elements, or more */
} ca_operand;

/* What to write to CA_ATTENTION_SCORES. */
typedef enum {
    CA_SCORES_SCALED,   /* scale * query @ key.T */
    CA_SCORES_STEP_ONE, /* after the softcap (the mask, with mask_before_softcap) */
    CA_SCORES_STEP_TWO, /* after both; -inf where a key is excluded */
    CA_SCORES_WEIGHTS,  /* after the softmax; zeros in an empty row */
} ca_scores_stage;

/* The operands that may lie in pages: keys, values and their scales. */
#define CA_PAGED_OPERANDS 6
extern const ca_attention_role ca_paged_roles[CA_PAGED_OPERANDS];

/* The sequences of a ragged problem. Rows of the query are those of all sequences, and so are the keys, unless
   they lie in pages. */
typedef struct {
    int64_t count;
    const int64_t *rows;    /* count + 1: rows[b] … rows[b + 1] - 1 are those of sequence b */
    const int64_t *keys;    /* count: its first key; with pages, where its own begin in `pages` */
    const int64_t *lengths; /* count: its keys */
    int64_t left;       /* a window: row i of a sequence stands at key i + its keys - its rows. */
    int64_t right;      /* CA_BAND_UNBOUNDED: no bound */
    bool causal;        /* row i sees no key after key i */
    bool rows_are_last; /* for mods row i stands where it does in a window; else at position i */
    int64_t page_size;  /* keys of a page; 0: there are no pages */
    const int64_t *pages;
    int64_t page_count; /* of `pages` */
    /* All pages, in the order of ca_paged_roles; the operands are views of the first one. NULL: absent. */
    const ca_tensor *paged[CA_PAGED_OPERANDS];
    int64_t most_keys; /* of a sequence */
} ca_sequences;

/* The keys are the past ones followed by the new ones: T = P + S. All operands have the
   leading dimensions `batch`, and broadcast to them by strides of 0; the present ones
   only in the last one, where query heads share them. Masks and biases of one row or
   column have stride 0 too, and their full size. query, key, input_bias, bias, output
   and scores share one float dtype. Doors check all this, and kernels rely on it.

       score[i, j] = scale * (query[i] + input_bias) . (key[j] + input_bias)
       score       = score_mod(score), of mods
       score       = softcap * tanh(score / softcap)
       score       = score + mask[i, j] + bias[i, j]
       weight[i, j] = exp(score[i, j]) / (sum_j exp(score[i, j]) + exp(sink))
       output[i]   = sum_j weight[i, j] * (value[j] + input_bias)

   The input bias is not added to past keys and values. A row without a key is zeros, and its
   log-sum-exp is the sink, or -inf without one. */
typedef struct ca_attention {
    int64_t batch[CA_BATCH_DIMS]; /* sizes; those of dimensions that are not there are 1 */
    int64_t L;                    /* query rows */
    int64_t S;                    /* new keys */
    int64_t P;                    /* past keys */
    int64_t T;                    /* all keys */
    int64_t E;                    /* head size of query and key */
    int64_t Ev;                   /* head size of value and output */
    ca_operand operands[CA_ATTENTION_OPERANDS];
    /* False: the mask tells which keys are attended to (not 0), and the others get
       `filter` added; -inf excludes them. True: the mask's values are added. Keys from M
       on are excluded. */
    bool mask_is_added;
    double filter;
    /* Row i attends key j only where -below <= j - i <= above; a bound may be negative,
       an unbounded side is CA_BAND_UNBOUNDED. Keys from key_counts on are excluded.
       band_follows_counts: the count is added to j's bounds. Offsets are added always. */
    int64_t below;
    int64_t above;
    bool band_follows_counts;
    double scale;
    double softcap; /* 0: none */
    /* The softcap comes after the mask: an excluded key has the score -softcap. */
    bool mask_before_softcap;
    /* Weights are dropped with this probability, by Philox 4x32-10 of seed, row and key;
       the others are scaled up. Rows are numbered over the leading dimensions and L;
       first_row is the number of row [0, 0, 0, 0]. */
    double dropout;
    uint64_t seed;
    int64_t first_row;
    bool in_float64;     /* compute in float64 whatever the dtypes are */
    const ca_mods *mods; /* what the user's functions make of scores; NULL: nothing */
    ca_scores_stage stage;
    uint64_t
        repeated; /* a bit for each role: an earlier problem of the call has these elements, too */
    const char *call;              /* the function that the user called, for messages */
    const ca_sequences *sequences; /* NULL: the problem is not ragged */
    int64_t
        code; /* what the bytes of keys and values are: CA_KERNEL_FLOAT8_…, _INT4; 0: their dtype */
    /* What is computed before (attention/inputs.h), on the way to a launch; NULL: nothing. */
    const struct ca_attention *inputs;
    /* The same problem with the scores that a kernel behind writes, on the way to a launch; NULL: none. */
    const struct ca_attention *scored;
} ca_attention;

/* Make a problem without options: full band, scale 1. All `views` become absent. */
void ca_attention_init(ca_attention *attention, ca_tensor views[CA_ATTENTION_OPERANDS]);

/* Take the views as operands, once the options are set. A view has output's leading
   dimensions, with strides of 0 where it broadcasts, then those of its role. Leading
   dimensions that one stride can walk in all views become one. If more than
   CA_BATCH_DIMS are left, the call is several problems, and this one becomes problem
   `index`. Returns how many there are: 1 or more. */
int64_t ca_attention_fold(ca_attention *attention, const ca_tensor views[CA_ATTENTION_OPERANDS],
                          int64_t index);

/* Make numbers and tables of `mods` operands, without folding. */
void ca_attention_set_mods(ca_attention *attention, const ca_mods *mods);

/* Make a tensor of 2 to 5 dimensions the output, without folding. */
void ca_attention_set_output(ca_attention *attention, const ca_tensor *output);

/* Take entries first … first + count - 1 of leading dimension `d`, or of the rows for
   d == CA_BATCH_DIMS. */
void ca_attention_take(ca_attention *attention, int d, int64_t first, int64_t count);

/* Remove an operand from the problem. */
void ca_attention_remove(ca_attention *attention, ca_attention_role role);

/* The bytes that an operand's elements touch. */
ca_extent ca_attention_extent(const ca_attention *attention, ca_attention_role role);

/* ---- questions that plans ask ---- */

/* Are keys and values bytes that stand for numbers? */
bool ca_attention_has_codes(const ca_attention *attention);

/* Do keys lie in pages? */
bool ca_attention_has_pages(const ca_attention *attention);

/* How many keys a page has; 0: there are no pages. */
int64_t ca_attention_page_size(const ca_attention *attention);

bool ca_attention_has(const ca_attention *attention, ca_attention_role role);

/* True if kernels write the operand of this role. */
bool ca_attention_is_result(ca_attention_role role);

/* What messages call the operand of this role. */
const char *ca_attention_name(ca_attention_role role);

/* Is the arithmetic in double? */
bool ca_attention_in_float64(const ca_attention *attention);

/* The softcap within the range of the arithmetic, 0 for none: in float32 one above the
   range is as good as none, one below as good as the smallest normal number. */
double ca_attention_softcap(const ca_attention *attention);

/* Does the softcap come after the mask? Without a softcap there is no such order. */
bool ca_attention_caps_last(const ca_attention *attention);

/* False where the probability of dropping is less than a random word resolves. */
bool ca_attention_drops(const ca_attention *attention);

/* Returns whether a function, such as ca_operand_is_wide, is true of all operands that kernels read keys
   and values from. */
bool ca_attention_keys_are(const ca_attention *attention, bool (*test)(const ca_operand *));

/* Are pages whole 16 bytes apart, those of keys and those of values? True without pages. */
bool ca_attention_pages_are_wide(const ca_attention *attention);

/* Bytes of a key and its value. */
int64_t ca_attention_key_bytes(const ca_attention *attention);

/* Are the keys and values that the call reads, each counted once, more than `bytes`? Those of a head, or
   those of all heads? */
bool ca_attention_keys_exceed(const ca_attention *attention, bool all, int64_t bytes);

/* Returns the largest number of keys that a row may see. */
int64_t ca_attention_visible_keys(const ca_attention *attention);

/* Returns the number of query heads that share their keys: the size of the last leading dimension
   if keys and values have a stride of 0 along it, else 1. */
int64_t ca_attention_heads_together(const ca_attention *attention);

/* An absent operand has no rows, and a past of no keys neither. */
bool ca_operand_has_rows(const ca_operand *operand);

/* Do the elements of a row lie side by side? */
bool ca_operand_rows_contiguous(const ca_operand *operand);

/* Do the elements of a row lie side by side, at least `columns` of them? */
bool ca_operand_rows_hold(const ca_operand *operand, int64_t columns);

/* Are rows contiguous, and does each row begin where the row before ends? */
bool ca_operand_rows_adjoin(const ca_operand *operand);

/* Is each row whole 16 bytes, at a multiple of 16 bytes on the device? */
#define CA_WIDE_BYTES 16
bool ca_operand_is_wide(const ca_operand *operand);

#endif
