/* Vectors of floats, 16 with AVX-512 and 8 with AVX2, and bfloat16 in memory as uint16_t, rounded to nearest even. */

#ifndef SSD_VECTOR_H
#define SSD_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#error "the kernels need AVX2 and FMA, or AVX-512"
#endif
#define RESTRICT __restrict__

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static inline vf splat(float x) {
#if LANES == 16
    return (vf)_mm512_set1_ps(x);
#else
    return (vf)_mm256_set1_ps(x);
#endif
}

/* a * b + sum, rounded once. */
static inline vf add_product(vf sum, vf a, vf b) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
}

static inline vf load_float(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void store_float(float *p, vf x) { memcpy(p, &x, sizeof x); }

static inline vf widen(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
#if LANES == 8
    vu wide = (vu)_mm256_cvtepu16_epi32((__m128i)h); /* which GCC makes six instructions of */
#else
    vu wide = __builtin_convertvector(h, vu);
#endif
    return (vf)(wide << 16);
}

static inline float widen_one(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline vh narrow(vf x) {
    vu u = (vu)x;
    return __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, vh);
}

static inline void store_narrow(uint16_t *p, vf x) {
    vh h = narrow(x);
    memcpy(p, &h, sizeof h);
}

static inline vf round_bf16(vf x) {
    vu u = (vu)x;
    return (vf)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}

static inline vf select_float(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

static inline vf max_float(vf a, vf b) { return select_float(a > b, a, b); }

static inline float sum_lanes(vf x) {
    float parts[LANES];
    store_float(parts, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

/* e^x to about one unit in the last place; 0 below -87, as for -inf. */
static inline vf exp_float(vf x) {
    vi is_zero = x < splat(-87.0f);
    vf y = max_float(x, splat(-87.0f));
    y = select_float(y > splat(88.0f), splat(88.0f), y);
    vf scaled = y * splat(1.44269504088896341f);
    /* Adding 1.5 * 2^23 rounds to an integer, which then sits in the low bits. */
    vf shifted = scaled + splat(12582912.0f);
    vi n = (vi)shifted - 0x4b400000;
    vf whole = shifted - splat(12582912.0f);
    vf r = y - whole * splat(0.693359375f);
    r = r + whole * splat(2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    vf power = (vf)((n + 127) << 23);
    return select_float(is_zero, splat(0.0f), p * power);
}

#endif
