// A float32 matrix to E4M3, one scale for each row and one byte for each number: the bytes of octavo.quantize.
#include <math.h>
#include <stddef.h>
#include <stdint.h>

static const float LARGEST = 448.0f;     // of E4M3
static const int LOWEST_EXPONENT = -6;   // below it the spacing stays the same
static const int MANTISSA = 3;           // bits

// The code of the number of E4M3 nearest to x: sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa.
static uint8_t round_to_e4m3(float x) {
    uint8_t sign = signbit(x) ? 0x80 : 0;
    float size = fminf(fabsf(x), LARGEST);
    if (size == 0.0f) return sign;

    int exponent;
    frexpf(size, &exponent);  // size = m * 2^exponent with 0.5 <= m < 1
    exponent = exponent - 1 < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent - 1;

    // Count in steps of the spacing, 2^(exponent - 3). rintf rounds ties to the even count. From 8 on the number is
    // normal, and 16 steps are the 8 of the next exponent: the sum below carries by itself.
    int steps = (int)rintf(ldexpf(size, MANTISSA - exponent));
    return sign | (uint8_t)(((exponent - LOWEST_EXPONENT) << MANTISSA) + steps);
}

// x [rows, cols], finite  ->  data [rows, cols] and scale [rows], with x = data * scale but for the rounding.
void quantize_rows(const float *x, size_t rows, size_t cols, uint8_t *data, float *scale) {
    for (size_t row = 0; row < rows; row++) {
        const float *from = x + row * cols;
        float amax = 0.0f;
        for (size_t col = 0; col < cols; col++) amax = fmaxf(amax, fabsf(from[col]));

        scale[row] = fmaxf(amax / LARGEST, 0x1p-126f);  // never divide by zero
        float inv_scale = 1.0f / scale[row];
        for (size_t col = 0; col < cols; col++) data[row * cols + col] = round_to_e4m3(from[col] * inv_scale);
    }
}
