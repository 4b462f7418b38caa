/* Products in float32, for CPUs that know no bfloat16: AVX2 with FMA, or AVX-512. Included by matmul.h.
 *
 * Weights are widened in registers, rows beforehand: into panels of up to 6 rows, [inputs][rows] each, whose sums
 * with a block of outputs fill the registers. Every output adds its inputs one after another, whatever the
 * panel: a row's sums do not depend on the rows beside it.
 */

#ifndef SSD_PRODUCT_FMA_H
#define SSD_PRODUCT_FMA_H

#include "scratch.h"

/* GCC otherwise takes constants out of the loops into registers that sums need, and keeps those in memory. */
#pragma GCC push_options
#pragma GCC optimize("no-move-loop-invariants")

#define VECTORS (BLOCK / LANES) /* of a block's outputs */
#define ACCUMULATORS (LANES == 8 ? 12 : 24) /* of the 16 or 32 registers */
#ifndef AHEAD
#define AHEAD 2048
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

typedef float Ready;

/* The rows in panels. Valid until the thread's scratch is taken again. */
static inline const Ready *ready_rows(const uint16_t *x, int rows, int inputs) {
    float *panel = scratch((size_t)rows * inputs);
    const float *all = panel;
    for (int first = 0; first < rows; first += PANEL) {
        int some = rows - first < PANEL ? rows - first : PANEL;
        for (int r = 0; r < some; r++)
            for (int i = 0; i < inputs; i++)
                panel[(size_t)i * some + r] = widen_one(x[(size_t)(first + r) * inputs + i]);
        panel += (size_t)some * inputs;
    }
    return all;
}

static inline void begin_group(int rows) { (void)rows; }
static inline void end_groups(void) {}

/* Makes the compiler read again what lies behind a pointer, rather than keep it in a register that a sum needs. */
#define READ_AGAIN(pointer) __asm__ volatile("" : "+r"(pointer))

/* For a shuffle: byte i to the top of a lane, zeros below it. */
#define TO_TOP(i) ((i) << 24 | 0x808080)

/* Vector v of a block's weights for the even or odd one of a pair of inputs. int8 comes times 2^24, which saves
 * shifting it down, and with AVX2 in the order of outputs that `order_outputs` undoes. */
static ALWAYS_INLINE vf widen_input(const uint8_t *at, int v, int is_int8, int is_odd) {
    if (!is_int8) {
        vu pair;
        memcpy(&pair, at + v * sizeof pair, sizeof pair);
        return (vf)(is_odd ? pair & 0xffff0000u : pair << 16);
    }
#if LANES == 8
    int i = v * 8 + is_odd;
    __m256i from = _mm256_setr_epi32(TO_TOP(i), TO_TOP(i + 2), TO_TOP(i + 4), TO_TOP(i + 6), /* twice: */
                                     TO_TOP(i), TO_TOP(i + 2), TO_TOP(i + 4), TO_TOP(i + 6));
    __m256i bytes = _mm256_loadu_si256((const __m256i *)at);
    return (vf)_mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes, from));
#else
    vh bytes;
    memcpy(&bytes, at, sizeof bytes);
    vu pair = __builtin_convertvector(bytes, vu);
    return __builtin_convertvector((vi)(is_odd ? pair << 16 & 0xff000000u : pair << 24), vf);
#endif
}

/* What sums of int8 weights become in the end. */
static ALWAYS_INLINE void order_outputs(vf sums[VECTORS]) {
    for (int v = 0; v < VECTORS; v++) sums[v] *= splat(0x1p-24f);
#if LANES == 8
    __m256 first = (__m256)sums[0], second = (__m256)sums[1];
    sums[0] = (vf)_mm256_permute2f128_ps(first, second, 0x20);
    sums[1] = (vf)_mm256_permute2f128_ps(first, second, 0x31);
#endif
}

/* Sums of a panel with some blocks. rows, blocks, is_int8: constants, so that the sums stay in registers. */
static ALWAYS_INLINE void panel_product(const float *panel, int inputs, int rows,
                                                                const uint8_t *const *block, int blocks,
                                                                int is_int8, float (*sums)[ROW_GROUP][BLOCK],
                                                                int first) {
    vf part[MOST_BLOCKS][PANEL][VECTORS];
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) part[b][r][v] = splat(0.0f);
    const float *x = panel;
    for (int pair = 0; pair < inputs / 2; pair++, x += 2 * rows) {
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
            const uint8_t *at = block[b] + (size_t)pair * BLOCK * (is_int8 ? 2 : 4);
            __builtin_prefetch(at + AHEAD);
#pragma GCC unroll 2
            for (int is_odd = 0; is_odd < 2; is_odd++) {
                vf weight[VECTORS];
                READ_AGAIN(at);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) weight[v] = widen_input(at, v, is_int8, is_odd);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    READ_AGAIN(x);
                    vf input = splat(x[is_odd * rows + r]);
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; v++) part[b][r][v] = add_product(part[b][r][v], weight[v], input);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int b = 0; b < blocks; b++)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            if (is_int8) order_outputs(part[b][r]);
            for (int v = 0; v < VECTORS; v++) store_float(sums[b][first + r] + v * LANES, part[b][r][v]);
        }
}

/* Sums of a panel of `rows`, a constant, with all blocks: as many at once as there are registers. */
static ALWAYS_INLINE void panel_products(const Matrix *m, const float *panel, int rows,
                                                                 const uint8_t *const *block, int blocks,
                                                                 Sums sums, int first) {
    int fitting = ACCUMULATORS / (VECTORS * rows), at_once = fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
    for (int b = 0; b < blocks; b += at_once)
        if (m->scales)
            panel_product(panel, m->inputs, rows, block + b, at_once, 1, sums + b, first);
        else
            panel_product(panel, m->inputs, rows, block + b, at_once, 0, sums + b, first);
}

static void product(const Matrix *m, const Ready *x, int rows, const uint8_t *const *block, int blocks, Sums sums) {
    const uint8_t *filled[MOST_BLOCKS]; /* with the first block again where there are fewer */
    for (int b = 0; b < MOST_BLOCKS; b++) filled[b] = block[b < blocks ? b : 0];
    for (int first = 0; first < rows; first += PANEL) {
        const float *panel = x + (size_t)first * m->inputs;
        switch (rows - first) {
        case 1: panel_products(m, panel, 1, filled, blocks, sums, first); break;
        case 2: panel_products(m, panel, 2, filled, blocks, sums, first); break;
        case 3: panel_products(m, panel, 3, filled, blocks, sums, first); break;
        case 4: panel_products(m, panel, 4, filled, blocks, sums, first); break;
        case 5: panel_products(m, panel, 5, filled, blocks, sums, first); break;
        default: panel_products(m, panel, PANEL, filled, blocks, sums, first);
        }
    }
}

#pragma GCC pop_options

#endif
