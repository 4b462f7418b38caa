/* Products on the matrix unit (AMX): up to 32 rows cost hardly more than one. Included by matmul.h. */

#ifndef SSD_PRODUCT_AMX_H
#define SSD_PRODUCT_AMX_H

#define TILE 512 /* numbers in a tile of weights: 16 pairs x 16 outputs x 2 */

typedef uint16_t Ready;

static inline const Ready *ready_rows(const uint16_t *x, int rows, int inputs) {
    (void)rows, (void)inputs;
    return x;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) TileConfig;

/* Tiles 0-3: sums. 4, 5: rows. 6, 7: weights. rows: of the group, up to 32. */
static inline void begin_group(int rows) {
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

static inline void end_groups(void) { _tile_release(); }

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
        const uint8_t *at = block[b] + (size_t)step * 16 * PAIR_BYTES(m);
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

static inline void product(const Matrix *m, const Ready *x, int rows, const uint8_t *const *block,
                           int blocks, Sums sums) {
    if (rows <= 16) {
        product_1x4(m, x, block, blocks, sums);
    } else {
        product_2x2(m, x, block, blocks < 2 ? blocks : 2, sums[0], sums[1]);
        if (blocks > 2) product_2x2(m, x, block + 2, blocks - 2, sums[2], sums[3]);
    }
}

#endif
