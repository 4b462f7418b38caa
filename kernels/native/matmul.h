/* Matrix products of a few bfloat16 rows with packed weights, bfloat16 or int8, accumulated in float32.
 *
 * For few rows the time is that of reading the weights once: they lie in the order in which they are read,
 * in blocks of 16 outputs, and several blocks are read side by side, which keeps more of the memory's
 * bandwidth busy than one stream does.
 *
 * Packed: [outputs / 16][inputs / 2][16 outputs][2 inputs].
 *
 * What the CPU has decides which of the product_*.h multiplies a group of rows with a few blocks.
 */

#ifndef SSD_MATMUL_H
#define SSD_MATMUL_H

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && !defined(SSD_NO_AMX)
#define SSD_AMX 1
#endif

#define BLOCK 16 /* outputs that are read together */
#define STEP 32  /* inputs are a multiple of this */
#define MOST_BLOCKS 4

/* Rows that share one reading of a block from the cache. */
#ifdef __AVX512BF16__
#define ROW_GROUP 32
#else
#define PANEL 6
#define ROW_GROUP (5 * PANEL)
#endif

/* A packed weight [outputs, inputs]: bfloat16, or int8 with a scale for each output. outputs: a multiple of 16,
 * inputs: of 32. bias: [outputs] or NULL. */
typedef struct {
    const void *packed;
    const float *scales; /* NULL: bfloat16 */
    const uint16_t *bias;
    int32_t outputs, inputs;
} Matrix;

/* Bytes of a pair of inputs in a block: half for int8. */
#define PAIR_BYTES(m) (BLOCK * 2 * ((m)->scales ? 1 : 2))

/* What a product leaves for its user: sums[block][row][output] of up to 4 blocks and a group of rows. */
typedef float Sums[MOST_BLOCKS][ROW_GROUP][BLOCK] __attribute__((aligned(64)));

#ifdef SSD_AMX
#include "product_amx.h"
#elif defined(__AVX512BF16__)
#include "product_bf16.h"
#else
#include "product_fma.h"
#endif

/* What is done with the sums of one block and one row. */
typedef enum { TO_BF16, ADD_TO_BF16, TO_FLOAT } Ending;

/* sums: of one row for the outputs from `place` on. */
static inline void finish(const Matrix *m, const float *sums, int place, void *out, int row, Ending ending) {
    size_t at = (size_t)row * m->outputs + place;
    for (int i = 0; i < BLOCK; i += LANES) {
        vf y = load_float(sums + i);
        if (m->scales) y *= load_float(m->scales + place + i);
        if (m->bias) y += widen(m->bias + place + i);
        if (ending == TO_BF16) {
            store_narrow((uint16_t *)out + at + i, y);
        } else if (ending == ADD_TO_BF16) {
            uint16_t *old = (uint16_t *)out + at + i;
            store_narrow(old, widen(old) + round_bf16(y));
        } else {
            store_float((float *)out + at + i, round_bf16(y));
        }
    }
}

/* out[t, n] = (+=, for ADD_TO_BF16) x[t] . weight[n] + bias[n], rounded to bfloat16 where it is formed.
 * x: [rows, inputs]. out: bfloat16 or, for TO_FLOAT, float32 [rows, outputs]. */
static void matmul(const Matrix *m, const uint16_t *x, int rows, void *out, Ending ending, int threads) {
    int num_blocks = m->outputs / BLOCK, num_groups = (num_blocks + MOST_BLOCKS - 1) / MOST_BLOCKS;
    size_t block_bytes = (size_t)m->inputs / 2 * PAIR_BYTES(m);
    const Ready *ready = ready_rows(x, rows, m->inputs);
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int configured = 0;
#pragma omp for schedule(static)
        for (int group = 0; group < num_groups; group++) {
            Sums sums;
            /* Far apart, so that each is a stream of its own: block j of a group lies j * num_groups on. */
            const uint8_t *block[MOST_BLOCKS];
            int number[MOST_BLOCKS], blocks = 0;
            for (int j = 0; j < MOST_BLOCKS; j++)
                if (group + j * num_groups < num_blocks) {
                    number[blocks] = group + j * num_groups;
                    block[blocks] = (const uint8_t *)m->packed + number[blocks] * block_bytes;
                    blocks++;
                }
            for (int first = 0; first < rows; first += ROW_GROUP) {
                int some = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
                if (configured != some) begin_group(configured = some);
                product(m, ready + (size_t)first * m->inputs, some, block, blocks, sums);
                for (int b = 0; b < blocks; b++)
                    for (int r = 0; r < some; r++)
                        finish(m, sums[b][r], number[b] * BLOCK, out, first + r, ending);
            }
        }
        if (configured) end_groups();
    }
}

#endif
