/* matmul: c = a b; a [M, K], b [K, N], c [M, N]. */
#include "common.metal"

kernel void matmul(device float *c [[buffer(0)]], device const float *a [[buffer(1)]],
                   device const float *b [[buffer(2)]], constant matmul_args &args [[buffer(3)]],
                   uint index [[thread_position_in_grid]])
{
    uint row = index / args.n, col = index % args.n;
    if (row >= args.m)
        return;
    float sum = 0;
    for (uint k = 0; k < args.k; k++)
        sum += a[ulong(row) * args.k + k] * b[ulong(k) * args.n + col];
    c[index] = sum;
}
