/* SPDX-License-Identifier: MIT
 *
 * Tests AMX. The host builds and runs this kernel once, if the processor has AMX and the system
 * allows it.
 *
 *     sums[i] = start + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
 *
 * One work-item owns all 16 sums, the diagonal of a product. No macros.
 */
#include "kernels/support/amx.clh"

__kernel void
probe_amx(__global const ushort *a, __global const ushort *b, __global float *sums,
          const float start)
{
    uint column[16][16] = {{0}};
    uint row[16][16] = {{0}};
    float product[16][16];
    for (int i = 0; i < 16; i++) {
        column[i][0] = a[2 * i] | (uint)a[2 * i + 1] << 16;
        row[0][i] = b[2 * i] | (uint)b[2 * i + 1] << 16;
        for (int j = 0; j < 16; j++) {
            product[i][j] = start;
        }
    }
    amx_start();
    AMX_LOAD(0, product, 64L);
    AMX_LOAD(1, column, 64L);
    AMX_LOAD(2, row, 64L);
    AMX_MULTIPLY_ADD(0, 1, 2);
    AMX_STORE(0, product, 64L);
    amx_end();
    for (int i = 0; i < 16; i++) {
        sums[i] = product[i][i];
    }
}
