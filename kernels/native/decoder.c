/* The parts of a decoder layer between its matrix products, for bfloat16 rows on a CPU.
 *
 * Plain C with the vector extensions of GCC and Clang; compiled on the machine it runs on, for AVX2 or
 * AVX-512, called through ctypes. Every function treats its rows one by one, in an order that does not depend on how many there
 * are. Attention adds its slots one after another: what a row must not see adds exactly nothing. A row's
 * result is therefore the same to the last bit in a chain, in a tree, alone or beside others.
 *
 * bfloat16 is held as uint16_t and rounded to nearest even where the reference rounds.
 * Dimensions are in elements. Hidden sizes and head dimensions are multiples of 32.
 */

#include "matmul.h"
#include "scratch.h"
#include "vector.h"

#ifdef SSD_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

static void norm_row(const uint16_t *row, const uint16_t *weight, uint16_t *out, int size, float eps) {
    vf total = splat(0.0f);
    for (int i = 0; i < size; i += LANES) {
        vf x = widen(row + i);
        total += x * x;
    }
    float scale = 1.0f / __builtin_sqrtf(sum_lanes(total) / (float)size + eps);
    for (int i = 0; i < size; i += LANES)
        store_narrow(out + i, round_bf16(widen(row + i) * splat(scale)) * widen(weight + i));
}

static void norm_rows(const uint16_t *hidden, const uint16_t *weight, uint16_t *out, int rows, int size,
                      float eps) {
    for (int t = 0; t < rows; t++)
        norm_row(hidden + (size_t)t * size, weight, out + (size_t)t * size, size, eps);
}

/* out = silu(gate) * up. gate_up: [rows, 2 * size], gate first. out: [rows, size]. */
static void gated_silu(const uint16_t *RESTRICT gate_up, uint16_t *RESTRICT out, int rows, int size) {
    for (int t = 0; t < rows; t++) {
        const uint16_t *gate = gate_up + (size_t)t * 2 * size, *up = gate + size;
        for (int i = 0; i < size; i += LANES) {
            vf x = widen(gate + i);
            vf silu = round_bf16(x / (splat(1.0f) + exp_float(-x)));
            store_narrow(out + (size_t)t * size + i, silu * widen(up + i));
        }
    }
}

static void rotate_head(uint16_t *head, const uint16_t *norm, const uint16_t *cos, const uint16_t *sin, int dim,
                        float eps) {
    if (norm) norm_row(head, norm, head, dim, eps);
    int half = dim / 2;
    for (int i = 0; i < half; i += LANES) {
        vf low = widen(head + i), high = widen(head + half + i);
        vf new_low = round_bf16(low * widen(cos + i)) + high * widen(sin + i);
        vf new_high = round_bf16(high * widen(cos + half + i)) + low * widen(sin + half + i);
        store_narrow(head + i, new_low);
        store_narrow(head + half + i, new_high);
    }
}

/* Rotate queries (in place) and keys, and put keys and values into one layer of the cache.
 * qkv: [rows, (heads + 2 * kv_heads) * dim]. cos, sin: [positions, dim], sin negative in its first half.
 * keys, values: [kv_heads, slots, dim], of which slot slots[t] is written for row t.
 * q_norm, k_norm: [dim] or NULL. */
static void rotate_and_write(uint16_t *RESTRICT qkv, const uint16_t *RESTRICT cos, const uint16_t *RESTRICT sin,
                          const int64_t *RESTRICT positions, const int64_t *RESTRICT slots,
                          uint16_t *RESTRICT keys, uint16_t *RESTRICT values, const uint16_t *q_norm,
                          const uint16_t *k_norm, int rows, int heads, int kv_heads, int dim, int64_t num_slots,
                          float eps) {
    size_t width = (size_t)(heads + 2 * kv_heads) * dim;
    for (int t = 0; t < rows; t++) {
        uint16_t *row = qkv + t * width;
        const uint16_t *c = cos + positions[t] * dim, *s = sin + positions[t] * dim;
        for (int h = 0; h < heads; h++) rotate_head(row + (size_t)h * dim, q_norm, c, s, dim, eps);
        for (int h = 0; h < kv_heads; h++) {
            uint16_t *key = row + (size_t)(heads + h) * dim;
            rotate_head(key, k_norm, c, s, dim, eps);
            size_t place = ((size_t)h * num_slots + slots[t]) * dim;
            memcpy(keys + place, key, dim * sizeof *key);
            memcpy(values + place, row + (size_t)(heads + kv_heads + h) * dim, dim * sizeof *key);
        }
    }
}

#define MAX_DIM 256

/* Queries, one a lane, as `score_keys` reads them, and its scores against a few keys at once. */
#ifdef __AVX512BF16__
#define KEYS 4
typedef uint32_t PackedQueries[MAX_DIM / 2 * LANES] __attribute__((aligned(64))); /* [dim / 2][lanes] pairs */

static inline void pack_query(const uint16_t *query, int lane, int dim, uint32_t *packed) {
    for (int i = 0; i < dim / 2; i++) memcpy(packed + i * LANES + lane, query + 2 * i, 4);
}

static inline void score_keys(const uint32_t *packed, const uint16_t *const key[KEYS], int dim, vf out[KEYS]) {
    __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
    const uint32_t *k0 = (const uint32_t *)key[0], *k1 = (const uint32_t *)key[1];
    const uint32_t *k2 = (const uint32_t *)key[2], *k3 = (const uint32_t *)key[3];
    for (int i = 0; i < dim / 2; i++) {
        __m512bh q = (__m512bh)_mm512_load_si512(packed + i * LANES);
        a = _mm512_dpbf16_ps(a, q, (__m512bh)_mm512_set1_epi32((int)k0[i]));
        b = _mm512_dpbf16_ps(b, q, (__m512bh)_mm512_set1_epi32((int)k1[i]));
        c = _mm512_dpbf16_ps(c, q, (__m512bh)_mm512_set1_epi32((int)k2[i]));
        d = _mm512_dpbf16_ps(d, q, (__m512bh)_mm512_set1_epi32((int)k3[i]));
    }
    out[0] = (vf)a, out[1] = (vf)b, out[2] = (vf)c, out[3] = (vf)d;
}
#else
#define KEYS 8
typedef float PackedQueries[MAX_DIM * LANES] __attribute__((aligned(64))); /* [dim][lanes] */

static inline void pack_query(const uint16_t *query, int lane, int dim, float *packed) {
    for (int i = 0; i < dim; i++) packed[i * LANES + lane] = widen_one(query[i]);
}

static inline void score_keys(const float *packed, const uint16_t *const key[KEYS], int dim, vf out[KEYS]) {
    float wide[KEYS][MAX_DIM] __attribute__((aligned(64)));
    vf sums[KEYS];
    for (int j = 0; j < KEYS; j++) {
        for (int i = 0; i < dim; i += LANES) store_float(wide[j] + i, widen(key[j] + i));
        sums[j] = splat(0.0f);
    }
    for (int i = 0; i < dim; i++) {
        vf q = load_float(packed + i * LANES);
        for (int j = 0; j < KEYS; j++) sums[j] = add_product(sums[j], q, splat(wide[j][i]));
    }
    for (int j = 0; j < KEYS; j++) out[j] = sums[j];
}
#endif

#define VALUE_BLOCK (4 * LANES) /* dimensions of a value that are summed at once: four vectors a query */

/* Which of the slots under a mask a block's queries see. bias: one row of 0 or -inf a slot, or NULL for a
 * causal chain: the query in lane q sees tail slots 0 .. last_seen[q]. */
typedef struct {
    const float *bias;
    int stride;
    vi last_seen;
} Visibility;

static inline vf hide(vf score, const Visibility *seen, int tail_slot) {
    if (seen->bias) return score + load_float(seen->bias + (size_t)tail_slot * seen->stride);
    return select_float(seen->last_seen < tail_slot, splat(-__builtin_inff()), score);
}

/* One key/value head and up to LANES of its queries. */
static void attend_block(const uint16_t *const query[LANES], uint16_t *const out[LANES], int num,
                         const uint16_t *keys, const uint16_t *values, const int64_t *physical, int length,
                         int tail_start, const Visibility *seen, int dim, float scale) {
    float *scores = scratch((size_t)length * LANES);
    PackedQueries packed;
    memset(packed, 0, sizeof packed);
    for (int q = 0; q < num; q++) pack_query(query[q], q, dim, packed);

    vf top = splat(-__builtin_inff());
    for (int slot = 0; slot < length; slot += KEYS) {
        const uint16_t *key[KEYS];
        for (int j = 0; j < KEYS; j++)
            key[j] = keys + physical[slot + j < length ? slot + j : length - 1] * dim;
        vf some[KEYS];
        score_keys(packed, key, dim, some);
        for (int j = 0; j < KEYS && slot + j < length; j++) {
            vf score = some[j] * splat(scale);
            if (slot + j >= tail_start) score = hide(score, seen, slot + j - tail_start);
            top = max_float(score, top);
            store_float(scores + (size_t)(slot + j) * LANES, score);
        }
    }
    vf total = splat(0.0f);
    for (int slot = 0; slot < length; slot++) {
        vf weight = exp_float(load_float(scores + (size_t)slot * LANES) - top);
        total += weight;
        store_float(scores + (size_t)slot * LANES, weight);
    }
    vf share = splat(1.0f) / total;
    for (int first = 0; first < dim; first += VALUE_BLOCK) {
        int vectors = (dim - first < VALUE_BLOCK ? dim - first : VALUE_BLOCK) / LANES;
        for (int q = 0; q < num; q += 3) {
            int some = num - q < 3 ? num - q : 3;
            vf sums[3][4];
            for (int a = 0; a < 3; a++)
                for (int b = 0; b < 4; b++) sums[a][b] = splat(0.0f);
            if (vectors == 4) {
                for (int slot = 0; slot < length; slot++) {
                    const uint16_t *value = values + physical[slot] * dim + first;
                    const float *weight = scores + (size_t)slot * LANES + q;
                    vf w[3]; /* lanes behind the last query hold finite numbers */
                    for (int a = 0; a < 3; a++) w[a] = splat(weight[a < some ? a : 0]);
                    for (int b = 0; b < 4; b++) {
                        vf v = widen(value + b * LANES);
                        for (int a = 0; a < 3; a++) sums[a][b] = add_product(sums[a][b], w[a], v);
                    }
                }
            } else {
                for (int slot = 0; slot < length; slot++) {
                    const uint16_t *value = values + physical[slot] * dim + first;
                    for (int a = 0; a < some; a++)
                        for (int b = 0; b < vectors; b++)
                            sums[a][b] = add_product(sums[a][b], splat(scores[(size_t)slot * LANES + q + a]),
                                                     widen(value + b * LANES));
                }
            }
            for (int a = 0; a < some; a++)
                for (int b = 0; b < vectors; b++)
                    store_narrow(out[q + a] + first + b * LANES, sums[a][b] * splat(share[q + a]));
        }
    }
}

/* Attention of one sequence's new rows over its cached slots, which hold the rows themselves already.
 * qkv: [rows, width], queries first. keys, values: [kv_heads, num_slots, dim] of one layer.
 * physical: [length] slot of each logical one. Logical slots from tail_start on are under
 * bias: [length - tail_start, bias_stride] with 0 or -inf at (slot, row * group + head in group), or, where it
 * is NULL, are the rows themselves as a causal chain.
 * out: [rows, heads * dim]. */
static void attend(const uint16_t *RESTRICT qkv, int width, const uint16_t *RESTRICT keys,
                const uint16_t *RESTRICT values, const int64_t *RESTRICT physical, int length, int tail_start,
                const float *RESTRICT bias, int bias_stride, uint16_t *RESTRICT out, int rows, int heads,
                int kv_heads, int dim, int64_t num_slots, float scale, int threads) {
    int group = heads / kv_heads, queries = rows * group, blocks = (queries + LANES - 1) / LANES;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1) schedule(static)
    for (int head = 0; head < kv_heads; head++)
        for (int block = 0; block < blocks; block++) {
            const uint16_t *query[LANES];
            uint16_t *result[LANES];
            int first = block * LANES, num = queries - first < LANES ? queries - first : LANES;
            Visibility seen = {bias ? bias + first : NULL, bias_stride, {0}};
            for (int q = 0; q < num; q++) {
                int row = (first + q) / group, member = (first + q) % group;
                query[q] = qkv + (size_t)row * width + (size_t)(head * group + member) * dim;
                result[q] = out + ((size_t)row * heads + head * group + member) * dim;
                seen.last_seen[q] = row;
            }
            /* What comes after a chain's last row in this block adds nothing to it. */
            int needed = bias ? length : tail_start + (first + num - 1) / group + 1;
            attend_block(query, result, num, keys + (size_t)head * num_slots * dim,
                         values + (size_t)head * num_slots * dim, physical, needed, tail_start, &seen, dim,
                         scale);
        }
}

/* A model. The same for all its forwards. */
typedef struct {
    int32_t num_layers, hidden, heads, kv_heads, dim, inner;
    float eps, scale;
    const uint16_t *embed, *final_norm, *cos, *sin;
    Matrix head;
    int64_t num_slots;
} Model;

/* Weights of a layer, head norms maybe NULL; and its part of the cache. */
typedef struct {
    const uint16_t *input_norm, *post_norm, *q_norm, *k_norm;
    Matrix qkv, o, gate_up, down;
    uint16_t *keys, *values;
} Layer;

/* One request's share of a forward: see `attend`. */
typedef struct {
    int32_t first_row, num_rows, length, tail_start, bias_stride, reserved;
    const int64_t *physical;
    const float *bias;
} Sequence;

/* Elements of bfloat16 that `ssd_forward` needs as scratch. */
int64_t ssd_scratch_size(const Model *m, int32_t rows) {
    int64_t width = (int64_t)(m->heads + 2 * m->kv_heads) * m->dim;
    return rows * (2 * (int64_t)m->hidden + width + (int64_t)m->heads * m->dim + 3 * (int64_t)m->inner);
}

/* Run rows through the model: token_ids, positions, slots (physical): [rows]; logits: [num_logit_rows, vocabulary]
 * of the rows named. */
void ssd_forward(const Model *m, const Layer *layers, const Sequence *sequences, int32_t num_sequences,
                 const int64_t *token_ids, const int64_t *positions, const int64_t *slots, int32_t rows,
                 const int64_t *logit_rows, int32_t num_logit_rows, float *logits, uint16_t *memory,
                 int32_t threads) {
    int size = m->hidden, width = (m->heads + 2 * m->kv_heads) * m->dim, attended_size = m->heads * m->dim;
    uint16_t *hidden = memory, *normed = hidden + (size_t)rows * size, *qkv = normed + (size_t)rows * size;
    uint16_t *attended = qkv + (size_t)rows * width, *gate_up = attended + (size_t)rows * attended_size;
    uint16_t *gated = gate_up + (size_t)rows * 2 * m->inner;
    for (int t = 0; t < rows; t++)
        memcpy(hidden + (size_t)t * size, m->embed + token_ids[t] * size, size * sizeof *hidden);
    for (const Layer *layer = layers; layer < layers + m->num_layers; layer++) {
        norm_rows(hidden, layer->input_norm, normed, rows, size, m->eps);
        matmul(&layer->qkv, normed, rows, qkv, TO_BF16, threads);
        rotate_and_write(qkv, m->cos, m->sin, positions, slots, layer->keys, layer->values, layer->q_norm,
                         layer->k_norm, rows, m->heads, m->kv_heads, m->dim, m->num_slots, m->eps);
        for (const Sequence *s = sequences; s < sequences + num_sequences; s++)
            attend(qkv + (size_t)s->first_row * width, width, layer->keys, layer->values, s->physical, s->length,
                   s->tail_start, s->bias, s->bias_stride, attended + (size_t)s->first_row * attended_size,
                   s->num_rows, m->heads, m->kv_heads, m->dim, m->num_slots, m->scale, threads);
        matmul(&layer->o, attended, rows, hidden, ADD_TO_BF16, threads);
        norm_rows(hidden, layer->post_norm, normed, rows, size, m->eps);
        matmul(&layer->gate_up, normed, rows, gate_up, TO_BF16, threads);
        gated_silu(gate_up, gated, rows, m->inner);
        matmul(&layer->down, gated, rows, hidden, ADD_TO_BF16, threads);
    }
    for (int r = 0; r < num_logit_rows; r++)
        norm_row(hidden + logit_rows[r] * size, m->final_norm, normed + (size_t)r * size, size, m->eps);
    matmul(&m->head, normed, num_logit_rows, logits, TO_FLOAT, threads);
}

/* out = x weight^T + bias, all bfloat16: for rows that do not go through `ssd_forward`. */
void ssd_matmul(const Matrix *m, const uint16_t *x, int32_t rows, uint16_t *out, int32_t threads) {
    matmul(m, x, rows, out, TO_BF16, threads);
}

/* Whether the matrix unit may be used: Linux asks for permission, once a process. 0 = yes. */
int32_t ssd_prepare(void) {
#ifdef SSD_AMX
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? -1 : 0;
#else
    return 0;
#endif
}
