// The machine's vector registers: sixteen lanes with AVX-512, eight with AVX2, of fp32 or 32-bit integers.
//
// Every sum here has a fixed order, so a lane's result never depends on which kernel computed it or on its neighbours.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace shoal {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int16_t Words __attribute__((vector_size(4 * LANES)));

// Accumulators stay in registers only if the loops over them are unrolled.
#define SHOAL_UNROLL _Pragma("GCC unroll 16")

inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
// The first `count` lanes, or all; zero beyond.
inline vf load(const float* p, int count) {
    if (count >= LANES) return load(p);
    vf v{};
    memcpy(&v, p, count * sizeof(float));
    return v;
}
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
inline vu load_units(const void* p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

#ifdef __AVX512F__
inline vf broadcast(float x) { return (vf)_mm512_set1_ps(x); }
inline vi broadcast(int32_t x) { return (vi)_mm512_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf load_fp16(const void* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vi rounded(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }
inline vf permuted(vf v, vi from) { return (vf)_mm512_permutexvar_ps((__m512i)from, (__m512)v); }
inline void store_bytes(int8_t* to, vi v) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v)); }
inline void store_words(int16_t* to, vi v) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)v)); }
#else
inline vf broadcast(float x) { return (vf)_mm256_set1_ps(x); }
inline vi broadcast(int32_t x) { return (vi)_mm256_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vf load_fp16(const void* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline vi rounded(vf v) { return (vi)_mm256_cvtps_epi32((__m256)v); }
inline vf permuted(vf v, vi from) { return (vf)_mm256_permutevar8x32_ps((__m256)v, (__m256i)from); }
inline void store_bytes(int8_t* to, vi v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
}
inline void store_words(int16_t* to, vi v) {
    const __m128i high = _mm256_extracti128_si256((__m256i)v, 1);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), high));
}
#endif

inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf smaller(vf a, vf b) { return a < b ? a : b; }
inline vf absolute(vf v) { return (vf)((vu)v & 0x7fffffffu); }
inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

inline vi lane_numbers() {
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// Lanes added in one fixed tree; the largest; the sum of integers.
#ifdef __AVX512F__
inline float sum_lanes(vf v) { return _mm512_reduce_add_ps((__m512)v); }
inline float max_lanes(vf v) { return _mm512_reduce_max_ps((__m512)v); }
inline int32_t sum_lanes(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
#else
inline float sum_lanes(vf v) {
    float half[LANES];
    store(half, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) half[i] += half[i + width];
    return half[0];
}
inline float max_lanes(vf v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
inline int32_t sum_lanes(vi v) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}
#endif

// e^x to about 2 ulp, for x up to 88; below -87 it stays at e^-87. Range reduction by Cody and Waite, then a polynomial.
inline vf exponential(vf x) {
    x = larger(smaller(x, broadcast(88.0f)), broadcast(-87.0f));
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vf n = fma(x, broadcast(1.44269504088896341f), broadcast(magic)) - magic;
    vf r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    vf p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * (vf)exponent;
}

// 2^x to about 2 ulp, for finite x up to 0; below -126 it is 2^-126 or less. 2^floor(x) times a polynomial in the rest.
inline vf power_of_two(vf x) {
#ifdef __AVX512F__
    constexpr int FLOOR = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    vf rest = x - (vf)_mm512_roundscale_ps((__m512)x, FLOOR);
#else
    x = larger(broadcast(-126.0f), x);  // in this order NaN stays
    vf whole = (vf)_mm256_floor_ps((__m256)x), rest = x - whole;
#endif
    vf p = broadcast(1.8775766948e-3f);
    p = fma(p, rest, broadcast(8.9893396944e-3f));
    p = fma(p, rest, broadcast(5.5826317519e-2f));
    p = fma(p, rest, broadcast(2.4015361071e-1f));
    p = fma(p, rest, broadcast(6.9315308332e-1f));
    p = fma(p, rest, broadcast(1.0f));
#ifdef __AVX512F__
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * (vf)((__builtin_convertvector(whole, vi) + 127) << 23);
#endif
}

inline float power_of_two(float x) { return power_of_two(broadcast(x))[0]; }

// Round to nearest even; a NaN stays one.
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t b) {
    uint32_t bits = uint32_t(b) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint16_t to_fp16(float x) { return uint16_t(_cvtss_sh(x, 0)); }
inline float from_fp16(uint16_t h) { return _cvtsh_ss(h); }

inline int rounded_up(int x, int step) { return (x + step - 1) / step * step; }

// What a 32-bit unit of a row holds, and how a register of them meets one broadcast unit of another row.
struct Fp32 {
    static constexpr int PER_UNIT = 1;
    typedef float Value;
    static Value of(float x) { return x; }
    static void store_units(uint32_t* to, vf v) { memcpy(to, &v, sizeof v); }
    static vf dot(vf acc, vu w, uint32_t a) {
        float x;
        memcpy(&x, &a, 4);
        return fma((vf)w, broadcast(x), acc);
    }
};

struct Bf16 {
    static constexpr int PER_UNIT = 2;
    typedef uint16_t Value;
    static Value of(float x) { return to_bf16(x); }
    static void store_units(uint32_t* to, vf v) {
#ifdef __AVX512BF16__
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
        vu bits = (vu)v;
        vu high = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // the NaN that arithmetic makes stays one
        typedef uint16_t Values __attribute__((vector_size(2 * LANES)));
        Values values = __builtin_convertvector(high, Values);
        memcpy(to, &values, sizeof values);
#endif
    }
    static vf dot(vf acc, vu w, uint32_t a) {
#ifdef __AVX512BF16__
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(a)));
#else
        acc = fma((vf)(w << 16), broadcast(from_bf16(uint16_t(a))), acc);
        return fma((vf)(w & 0xffff0000u), broadcast(from_bf16(uint16_t(a >> 16))), acc);
#endif
    }
};

// Unsigned weights times signed activations, four products a lane, summed exactly in int32 (dot4); and two products of
// signed 16-bit numbers (dot2).
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
typedef vu Weights4;
typedef vi Activations4;
inline Weights4 weights4(vu w) { return w; }
inline Activations4 activations4(uint32_t a) { return broadcast(int32_t(a)); }
inline vi dot2(vi acc, vu a, uint32_t b) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)broadcast(int32_t(b)));
#else
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)broadcast(int32_t(b)));
#endif
}
inline vi dot4(vi acc, Weights4 w, Activations4 a) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)a);
#endif
}
#else
// Without VNNI in 16-bit steps, which cannot saturate as `maddubs` would: even bytes and odd bytes apart.
struct Weights4 { vi even, odd; };
struct Activations4 { vi even, odd; };
inline Weights4 weights4(vu w) { return {(vi)(w & 0x00ff00ffu), (vi)(w >> 8 & 0x00ff00ffu)}; }
inline Activations4 activations4(uint32_t a) {
    vi both = broadcast(int32_t(a));
    return {(vi)((Words)(both << 8) >> 8), (vi)((Words)both >> 8)};
}
inline vi multiply_add(vi a, vi b) {
#ifdef __AVX512BW__
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
inline vi dot2(vi acc, vu a, uint32_t b) { return acc + multiply_add((vi)a, broadcast(int32_t(b))); }
inline vi dot4(vi acc, Weights4 w, Activations4 a) {
    return acc + multiply_add(w.even, a.even) + multiply_add(w.odd, a.odd);
}
#endif

}  // namespace shoal
