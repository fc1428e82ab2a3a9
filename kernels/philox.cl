/* SPDX-License-Identifier: MIT
 *
 * Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011):
 * random words from a counter, so that which weights are dropped depends on the seed
 * and their position alone.
 *
 *     key      seed, low word and high word
 *     counter  j / 4, two words, then the row's number, two words
 *     weight   of key j is dropped where word j % 4 is at most params.last_dropped
 */
#ifndef CLATTN_PHILOX_CL
#define CLATTN_PHILOX_CL

#include "common.cl"

/* counter[4] becomes the four words, in `uints`: uint, or a vector with a row a
   lane. */
#define DEFINE_PHILOX(name, uints)                                                     \
    static inline void name(uints *counter, ca_int64 seed)                             \
    {                                                                                  \
        uint key0 = (uint)seed;                                                        \
        uint key1 = (uint)((ulong)seed >> 32);                                         \
        for (int round = 0; round < 10; round++) {                                     \
            const uints high0 = mul_hi((uints)0xd2511f53u, counter[0]);                \
            const uints low0 = counter[0] * 0xd2511f53u;                               \
            const uints high1 = mul_hi((uints)0xcd9e8d57u, counter[2]);                \
            const uints low1 = counter[2] * 0xcd9e8d57u;                               \
            counter[0] = high1 ^ counter[1] ^ key0;                                    \
            counter[1] = low1;                                                         \
            counter[2] = high0 ^ counter[3] ^ key1;                                    \
            counter[3] = low0;                                                         \
            key0 += 0x9e3779b9u;                                                       \
            key1 += 0xbb67ae85u;                                                       \
        }                                                                              \
    }

DEFINE_PHILOX(philox, uint)

/* Whether the weight of key j in a row, numbered over all batches, is dropped. */
static inline bool
ca_drops(const ca_attention_params *params, ca_int64 row, ca_int64 j)
{
    const ulong quad = (ulong)j >> 2;
    uint words[4] = {(uint)quad, (uint)(quad >> 32), (uint)row,
                     (uint)((ulong)row >> 32)};
    philox(words, params->seed);
    return words[j & 3] <= params->last_dropped;
}

#endif
