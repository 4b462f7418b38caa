/* Products with the AVX512-BF16 instructions, which multiply pairs. Included by matmul.h. */

#ifndef SSD_PRODUCT_BF16_H
#define SSD_PRODUCT_BF16_H

typedef uint16_t Ready;

static inline const Ready *ready_rows(const uint16_t *x, int rows, int inputs) {
    (void)rows, (void)inputs;
    return x;
}

static inline void begin_group(int rows) { (void)rows; }
static inline void end_groups(void) {}

/* A pair of inputs of int8 weights as bfloat16, which holds all of their 256 values. */
static inline __m512bh widen_pair(const uint8_t *weight) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)weight);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}

static inline void product(const Matrix *m, const Ready *x, int rows, const uint8_t *const *block, int blocks,
                           Sums sums) {
    for (int b = 0; b < blocks; b++)
        for (int first = 0; first < rows; first += 8) {
            __m512 part[8];
            int some = rows - first < 8 ? rows - first : 8;
            for (int r = 0; r < 8; r++) part[r] = _mm512_setzero_ps();
            for (int pair = 0; pair < m->inputs / 2; pair++) {
                const uint8_t *at = block[b] + (size_t)pair * PAIR_BYTES(m);
                __m512bh weight = m->scales ? widen_pair(at) : (__m512bh)_mm512_loadu_si512(at);
                for (int r = 0; r < some; r++) {
                    int32_t both;
                    memcpy(&both, x + (size_t)(first + r) * m->inputs + 2 * pair, sizeof both);
                    part[r] = _mm512_dpbf16_ps(part[r], weight, (__m512bh)_mm512_set1_epi32(both));
                }
            }
            for (int r = 0; r < some; r++) _mm512_storeu_ps(sums[b][first + r], part[r]);
        }
}

#endif
