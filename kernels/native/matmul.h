/* Matrix products of a few bfloat16 rows with packed bfloat16 weights, accumulated in float32.
 *
 * For few rows the time is that of reading the weights once: they lie in the order in which they are read,
 * in blocks of 16 outputs, and several blocks are read side by side, which keeps more of the memory's
 * bandwidth busy than one stream does. With AMX up to 32 rows cost hardly more than one.
 *
 * Packed: [outputs / 16][inputs / 32][16 pairs of inputs][16 outputs][2], outputs padded with zeros.
 */

#ifndef SSD_MATMUL_H
#define SSD_MATMUL_H

#include "vector.h"

#if defined(__AMX_BF16__) && !defined(SSD_NO_AMX)
#define SSD_AMX 1
#endif

#define STEP 32      /* inputs in a tile */
#define TILE 512     /* numbers in a tile of weights: 16 pairs x 16 outputs x 2 */
#define ROW_GROUP 32 /* rows that share one reading of a block from the cache */
#define MOST_BLOCKS 4

/* What a product leaves for its user: sums[block][row][output] of up to 4 blocks and 32 rows. */
typedef float Sums[MOST_BLOCKS][ROW_GROUP][LANES] __attribute__((aligned(64)));

#ifdef SSD_AMX

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) TileConfig;

/* Tiles 0-3: sums. 4, 5: rows. 6, 7: weights. rows: of the group, up to 32. */
static inline void configure_tiles(int rows) {
    TileConfig config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    int upper = rows < 16 ? rows : 16, lower = rows - upper;
    for (int tile = 0; tile < 8; tile++) {
        int count = 16;
        if (rows <= 16) {
            if (tile < 6) count = upper;
        } else if (tile == 0 || tile == 1 || tile == 4) {
            count = upper;
        } else if (tile == 2 || tile == 3 || tile == 5) {
            count = lower;
        }
        config.row_bytes[tile] = 64;
        config.rows[tile] = (uint8_t)count;
    }
    _tile_loadconfig(&config);
}

/* Up to 16 rows and 4 blocks. */
static inline void product_1x4(const uint16_t *x, int inputs, const uint16_t *const block[4], int blocks,
                               Sums sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    size_t stride = (size_t)inputs * 2;
    if (blocks == 4) {
        for (int step = 0; step < inputs / STEP; step++) {
            _tile_loadd(4, x + step * STEP, stride);
            _tile_loadd(6, block[0] + step * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, block[1] + step * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, block[2] + step * TILE, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, block[3] + step * TILE, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    } else {
        for (int step = 0; step < inputs / STEP; step++) {
            _tile_loadd(4, x + step * STEP, stride);
            _tile_loadd(6, block[0] + step * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (blocks > 1) {
                _tile_loadd(7, block[1] + step * TILE, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (blocks > 2) {
                _tile_loadd(6, block[2] + step * TILE, 64);
                _tile_dpbf16ps(2, 4, 6);
            }
        }
    }
    _tile_stored(0, sums[0], 64);
    if (blocks > 1) _tile_stored(1, sums[1], 64);
    if (blocks > 2) _tile_stored(2, sums[2], 64);
    if (blocks > 3) _tile_stored(3, sums[3], 64);
}

/* 17 to 32 rows and 2 blocks. */
static inline void product_2x2(const uint16_t *x, int inputs, const uint16_t *left, const uint16_t *right,
                               float (*left_sums)[LANES], float (*right_sums)[LANES]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    size_t stride = (size_t)inputs * 2;
    for (int step = 0; step < inputs / STEP; step++) {
        _tile_loadd(4, x + step * STEP, stride);
        _tile_loadd(5, x + step * STEP + 16 * (size_t)inputs, stride);
        _tile_loadd(6, left + step * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, right + step * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, left_sums, 64);
    _tile_stored(2, left_sums + 16, 64);
    _tile_stored(1, right_sums, 64);
    _tile_stored(3, right_sums + 16, 64);
}

static inline void product(const uint16_t *x, int rows, int inputs, const uint16_t *const block[4], int blocks,
                           Sums sums) {
    if (rows <= 16) {
        product_1x4(x, inputs, block, blocks, sums);
    } else {
        product_2x2(x, inputs, block[0], block[blocks > 1 ? 1 : 0], sums[0], sums[1]);
        if (blocks > 2) product_2x2(x, inputs, block[2], block[blocks > 3 ? 3 : 2], sums[2], sums[3]);
    }
}

#else

static inline void configure_tiles(int rows) { (void)rows; }

/* weight: one pair of inputs for 16 outputs; x: the pair of a row. */
static inline vf add_pair(vf sum, const uint16_t *weight, const uint16_t *x) {
#ifdef __AVX512BF16__
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weight),
                                (__m512bh)_mm512_set1_epi32(pair));
#else
    vu both;
    memcpy(&both, weight, sizeof both);
    sum += (vf)(both << 16) * splat(widen_one(x[0]));
    return sum + (vf)(both & 0xffff0000u) * splat(widen_one(x[1]));
#endif
}

static inline void product(const uint16_t *x, int rows, int inputs, const uint16_t *const block[4], int blocks,
                           Sums sums) {
    for (int b = 0; b < blocks; b++)
        for (int first = 0; first < rows; first += 8) {
            vf part[8];
            int some = rows - first < 8 ? rows - first : 8;
            for (int r = 0; r < 8; r++) part[r] = splat(0.0f);
            for (int pair = 0; pair < inputs / 2; pair++)
                for (int r = 0; r < some; r++)
                    part[r] = add_pair(part[r], block[b] + (size_t)pair * 2 * LANES,
                                       x + (size_t)(first + r) * inputs + 2 * pair);
            for (int r = 0; r < some; r++) store_float(sums[b][first + r], part[r]);
        }
}

#endif

/* What is done with the sums of one block and one row. */
typedef enum { TO_BF16, ADD_TO_BF16, TO_FLOAT } Ending;

/* out[t, n] = (+=, for ADD_TO_BF16) x[t] . weight[n] + bias[n], rounded to bfloat16 where it is formed.
 * x: [rows, inputs]. packed: of [outputs, inputs]. bias: [outputs] or NULL.
 * out: bfloat16 or float32 [rows, outputs]. inputs: a multiple of 32; outputs: of 16, or of 1 for TO_FLOAT. */
static void matmul(const uint16_t *x, int rows, int inputs, const uint16_t *packed, const uint16_t *bias,
                   int outputs, void *out, Ending ending, int threads) {
    int num_blocks = (outputs + LANES - 1) / LANES, num_groups = (num_blocks + MOST_BLOCKS - 1) / MOST_BLOCKS;
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int configured = 0;
#pragma omp for schedule(static)
        for (int group = 0; group < num_groups; group++) {
            Sums sums;
            /* Far apart, so that each is a stream of its own: block j of a group lies j * num_groups on. */
            const uint16_t *block[MOST_BLOCKS];
            int number[MOST_BLOCKS], blocks = 0;
            for (int j = 0; j < MOST_BLOCKS; j++)
                if (group + j * num_groups < num_blocks) {
                    number[blocks] = group + j * num_groups;
                    block[blocks] = packed + (size_t)number[blocks] * LANES * inputs;
                    blocks++;
                }
            for (int first = 0; first < rows; first += ROW_GROUP) {
                int some = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
                if (configured != some) configure_tiles(configured = some);
                product(x + (size_t)first * inputs, some, inputs, block, blocks, sums);
                for (int b = 0; b < blocks; b++)
                    for (int r = 0; r < some; r++) {
                        int place = number[b] * LANES;
                        size_t at = (size_t)(first + r) * outputs + place;
                        vf y = load_float(sums[b][r]);
                        if (bias) y += widen(bias + place);
                        if (ending == TO_BF16) {
                            store_narrow((uint16_t *)out + at, y);
                        } else if (ending == ADD_TO_BF16) {
                            uint16_t *old = (uint16_t *)out + at;
                            store_narrow(old, widen(old) + round_bf16(y));
                        } else if (place + LANES <= outputs) {
                            store_float((float *)out + at, round_bf16(y));
                        } else {
                            vf rounded = round_bf16(y);
                            memcpy((float *)out + at, &rounded, (outputs - place) * sizeof(float));
                        }
                    }
            }
        }
#ifdef SSD_AMX
        if (configured) _tile_release();
#endif
    }
}

#endif
