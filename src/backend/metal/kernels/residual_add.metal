/* residual_add: x += y */
#include "common.metal"

kernel void residual_add(device float *x [[buffer(0)]], device const float *y [[buffer(1)]],
                         constant elements_args &args [[buffer(2)]],
                         uint index [[thread_position_in_grid]])
{
    if (index < args.n)
        x[index] += y[index];
}
