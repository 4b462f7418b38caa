/* Matrix products of a few bfloat16 rows with packed weights, bfloat16 or int8, accumulated in float32.
 *
 * For few rows the time is that of reading the weights once: they lie in the order in which they are read,
 * in blocks of 16 outputs, and several blocks are read side by side, which keeps more of the memory's
 * bandwidth busy than one stream does. With AMX up to 32 rows cost hardly more than one.
 *
 * Packed: [outputs / 16][inputs / 32][16 pairs of inputs][16 outputs][2].
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

/* A packed weight [outputs, inputs]: bfloat16, or int8 with a scale for each output. outputs: a multiple of 16,
 * inputs: of 32. bias: [outputs] or NULL. */
typedef struct {
    const void *packed;
    const float *scales; /* NULL: bfloat16 */
    const uint16_t *bias;
    int32_t outputs, inputs;
} Matrix;

/* Bytes of a block's tile: half for int8. */
#define TILE_BYTES(m) ((m)->scales ? TILE : TILE * 2)

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

/* A tile of int8 weights as bfloat16, which holds all of their 256 values. */
static inline void widen_tile(const uint8_t *tile, uint16_t *out) {
    for (int pair = 0; pair < 16; pair++) {
        __m256i bytes = _mm256_load_si256((const __m256i *)(tile + pair * 32));
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
        _mm512_store_si512(out + pair * 32, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

/* The same tile of several blocks, ready to be loaded: in place, or widened into `room`. */
static inline void ready_tiles(const Matrix *m, const uint8_t *const *block, int blocks, int step,
                               uint16_t (*room)[TILE], const uint16_t **tile) {
    for (int b = 0; b < blocks; b++) {
        const uint8_t *at = block[b] + (size_t)step * TILE_BYTES(m);
        if (m->scales) widen_tile(at, room[b]);
        tile[b] = m->scales ? room[b] : (const uint16_t *)at;
    }
}

/* Up to 16 rows and 4 blocks. */
static inline void product_1x4(const Matrix *m, const uint16_t *x, const uint8_t *const *block, int blocks,
                               Sums sums) {
    _Alignas(64) uint16_t room[2][MOST_BLOCKS][TILE];
    const uint16_t *tile[2][MOST_BLOCKS];
    int steps = m->inputs / STEP;
    size_t stride = (size_t)m->inputs * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    ready_tiles(m, block, blocks, 0, room[0], tile[0]);
    for (int step = 0; step < steps; step++) {
        const uint16_t *const *now = tile[step & 1];
        _tile_loadd(4, x + step * STEP, stride);
        _tile_loadd(6, now[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        if (blocks > 1) {
            _tile_loadd(7, now[1], 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (blocks > 2) {
            _tile_loadd(6, now[2], 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (blocks > 3) {
            _tile_loadd(7, now[3], 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        if (step + 1 < steps)
            ready_tiles(m, block, blocks, step + 1, room[(step + 1) & 1], tile[(step + 1) & 1]);
    }
    _tile_stored(0, sums[0], 64);
    if (blocks > 1) _tile_stored(1, sums[1], 64);
    if (blocks > 2) _tile_stored(2, sums[2], 64);
    if (blocks > 3) _tile_stored(3, sums[3], 64);
}

/* 17 to 32 rows and 2 blocks. */
static inline void product_2x2(const Matrix *m, const uint16_t *x, const uint8_t *const *block, int blocks,
                               float (*left_sums)[LANES], float (*right_sums)[LANES]) {
    _Alignas(64) uint16_t room[2][MOST_BLOCKS][TILE];
    const uint16_t *tile[2][MOST_BLOCKS];
    int steps = m->inputs / STEP;
    size_t stride = (size_t)m->inputs * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    ready_tiles(m, block, blocks, 0, room[0], tile[0]);
    for (int step = 0; step < steps; step++) {
        const uint16_t *const *now = tile[step & 1];
        _tile_loadd(4, x + step * STEP, stride);
        _tile_loadd(5, x + step * STEP + 16 * (size_t)m->inputs, stride);
        _tile_loadd(6, now[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (blocks > 1) {
            _tile_loadd(7, now[1], 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (step + 1 < steps)
            ready_tiles(m, block, blocks, step + 1, room[(step + 1) & 1], tile[(step + 1) & 1]);
    }
    _tile_stored(0, left_sums, 64);
    _tile_stored(2, left_sums + 16, 64);
    if (blocks > 1) {
        _tile_stored(1, right_sums, 64);
        _tile_stored(3, right_sums + 16, 64);
    }
}

static inline void product(const Matrix *m, const uint16_t *x, int rows, const uint8_t *const *block,
                           int blocks, Sums sums) {
    if (rows <= 16) {
        product_1x4(m, x, block, blocks, sums);
    } else {
        product_2x2(m, x, block, blocks < 2 ? blocks : 2, sums[0], sums[1]);
        if (blocks > 2) product_2x2(m, x, block + 2, blocks - 2, sums[2], sums[3]);
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

static inline void widen_pair(const uint8_t *weight, uint16_t *out) {
    for (int i = 0; i < 2; i++) {
        vb bytes;
        memcpy(&bytes, weight + i * LANES, sizeof bytes);
        store_narrow(out + i * LANES, __builtin_convertvector(bytes, vf));
    }
}

static inline void product(const Matrix *m, const uint16_t *x, int rows, const uint8_t *const *block,
                           int blocks, Sums sums) {
    for (int b = 0; b < blocks; b++)
        for (int first = 0; first < rows; first += 8) {
            vf part[8];
            int some = rows - first < 8 ? rows - first : 8;
            for (int r = 0; r < 8; r++) part[r] = splat(0.0f);
            for (int pair = 0; pair < m->inputs / 2; pair++) {
                uint16_t room[2 * LANES];
                const uint16_t *weight = (const uint16_t *)block[b] + (size_t)pair * 2 * LANES;
                if (m->scales) {
                    widen_pair(block[b] + (size_t)pair * 2 * LANES, room);
                    weight = room;
                }
                for (int r = 0; r < some; r++)
                    part[r] = add_pair(part[r], weight, x + (size_t)(first + r) * m->inputs + 2 * pair);
            }
            for (int r = 0; r < some; r++) store_float(sums[b][first + r], part[r]);
        }
}

#endif

/* What is done with the sums of one block and one row. */
typedef enum { TO_BF16, ADD_TO_BF16, TO_FLOAT } Ending;

/* out[t, n] = (+=, for ADD_TO_BF16) x[t] . weight[n] + bias[n], rounded to bfloat16 where it is formed.
 * x: [rows, inputs]. out: bfloat16 or, for TO_FLOAT, float32 [rows, outputs]. */
static void matmul(const Matrix *m, const uint16_t *x, int rows, void *out, Ending ending, int threads) {
    int num_blocks = m->outputs / LANES, num_groups = (num_blocks + MOST_BLOCKS - 1) / MOST_BLOCKS;
    size_t block_bytes = (size_t)m->inputs / STEP * TILE_BYTES(m);
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
                if (configured != some) configure_tiles(configured = some);
                product(m, x + (size_t)first * m->inputs, some, block, blocks, sums);
                for (int b = 0; b < blocks; b++)
                    for (int r = 0; r < some; r++) {
                        int place = number[b] * LANES;
                        size_t at = (size_t)(first + r) * m->outputs + place;
                        vf y = load_float(sums[b][r]);
                        if (m->scales) y *= load_float(m->scales + place);
                        if (m->bias) y += widen(m->bias + place);
                        if (ending == TO_BF16) {
                            store_narrow((uint16_t *)out + at, y);
                        } else if (ending == ADD_TO_BF16) {
                            uint16_t *old = (uint16_t *)out + at;
                            store_narrow(old, widen(old) + round_bf16(y));
                        } else {
                            store_float((float *)out + at, round_bf16(y));
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
