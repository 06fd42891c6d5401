#include <math.h>
#include <stdint.h>
#include <string.h>

/* exp of x <= 0 to about one unit in the last place; zero below -87 (Cephes' expf, branch free so that it vectorises) */
static inline float exponential(float x) {
    float low = x < -87.0f ? -87.0f : x;
    float n = rintf(low * 1.44269504088896341f);
    float r = low - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}
