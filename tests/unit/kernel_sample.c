/* The draw of a row's token, against a sort in float64. */
#include "kernel_frame.h"

#include "base/philox.h"

#include <stdlib.h>

typedef struct ranked {
    double p;
    int32_t id;
} ranked;

static int by_rank(const void *one, const void *other)
{
    const ranked *x = one, *y = other;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : x->id < y->id ? -1 : 1;
}

/* What may be drawn from N logits, in order, and how far the sum of probabilities, which are then
 * of 1, is behind each: C [n]. Returns how many. */
static size_t drawn_from(const float *logits, size_t n, const bml_draw *draw, ranked *c)
{
    bool ranks = draw->top_k > 0 && (size_t)draw->top_k < n;
    double largest = -INFINITY, all = 0, sum = 0;
    size_t left = n, kept = 0;
    for (size_t i = 0; i < n; i++)
        largest = fmax(largest, logits[i]);
    for (size_t i = 0; i < n; i++) /* without ranks from the last id on */
        c[n - 1 - i] = (ranked){exp((logits[i] - largest) / draw->temperature), (int32_t)i};
    if (ranks || draw->top_p < 1)
        qsort(c, n, sizeof *c, by_rank);
    if (ranks)
        for (left = (size_t)draw->top_k; left < n && c[left].p == c[left - 1].p;)
            left++;
    for (size_t i = 0; i < left; i++)
        all += c[i].p;
    for (size_t i = 0; i < left; i++) {
        if (draw->top_p < 1 && i && sum >= draw->top_p * all)
            break;
        if (c[i].p < draw->min_p)
            continue;
        sum += c[i].p;
        c[kept++] = (ranked){sum, c[i].id};
    }
    for (size_t i = 0; i < kept; i++)
        c[i].p /= sum;
    return kept;
}

void test_sample(void **state)
{
    (void)state;
    enum { MOST = 60000, ROWS = 40 };
    static ranked c[MOST];
    static const float top_p[] = {1, 0.95f, 0.5f, 0, 1}, min_p[] = {0, 0.02f, 1, 0},
                       temperature[] = {1, 0.8f, 0, 1.7f, 1e-3f, 1e-38f, 4};
    int32_t zeros[ROWS] = {0}, row[ROWS];
    for (int r = 0; r < ROWS; r++)
        row[r] = r;
    for (int i = 0; i < (suite->few ? 40 : 400) && b->sample; i++) {
        /* Now and then many rows, or more logits than a block has room for. */
        bool many = i % 20 == 11, long_row = i % 40 == 13;
        size_t n = many ? ROWS : up_to(4), cols = up_to(i % 10 ? i % 3 ? 300 : 5000 : MOST);
        size_t valid;
        if (many)
            cols = up_to(300);
        if (long_row)
            cols = MOST;
        valid = i % 4 ? cols : up_to(cols);
        array x = random_array(n * cols, i % 5 == 4 ? 0 : i % 5 ? 3 : 12);
        array ids = array_of(n * sizeof(int32_t));
        float *xs = x.data;
        bml_draw draw[ROWS];
        for (size_t j = 0; j < n * cols && i % 7 == 6; j++)
            xs[j] = roundf(xs[j]); /* many ties, and zeros of both signs */
        for (size_t r = 0; r < n; r++)
            draw[r] = (bml_draw){
                .seed = (uint64_t)i,
                .step = r,
                .temperature = temperature[up_to(i % 2 ? 2 : 7) - 1],
                .top_p = top_p[up_to(5) - 1],
                .min_p = min_p[up_to(4) - 1],
                .top_k = (int32_t)up_to(4) == 1 ? 0 : (int32_t)up_to(i % 3 ? 60 : valid + 1)};
        size_t bad = i % 8 == 7 ? up_to(n * cols) - 1 : n * cols;
        float *copy = malloc(n * cols * sizeof *copy);
        assert_non_null(copy);
        if (bad < n * cols)
            xs[bad] = i % 3 ? NAN : i % 16 == 7 ? INFINITY : -INFINITY;
        memcpy(copy, xs, n * cols * sizeof *copy);
        bml_batch batch = {(int)n, zeros, zeros, zeros, (int)n, row, NULL, draw};
        begin_pass(&batch);
        b->sample(queue, &ids.buffer, &x.buffer, (int)n, (int)cols, (int)valid);
        end_pass();
        for (size_t r = 0; r < n; r++) {
            const float *logits = copy + r * cols;
            int32_t got = ((int32_t *)ids.data)[r];
            size_t at = 0, kept = 0;
            if (bad / cols == r && bad % cols < valid) {
                assert_int_equal(got, -1);
                continue;
            }
            assert_in_range(got, 0, valid - 1);
            if (draw[r].temperature == 0) {
                for (size_t j = 0; j < valid; j++)
                    assert_true(logits[j] < logits[got] ||
                                (logits[j] == logits[got] && j >= (size_t)got));
                continue;
            }
            kept = drawn_from(logits, valid, &draw[r], c);
            while (at < kept && c[at].id != got)
                at++;
            double u = bml_philox_uniform(draw[r].seed, draw[r].step);
            double from = at && at < kept ? c[at - 1].p : 0, to = at < kept ? c[at].p : -1;
            if (!(u >= from - 1e-5 && u <= to + 1e-5))
                fail_msg("%zu of %zu logits, temperature %g, top_k %d, top_p %g, min_p %g: %.9f "
                         "draws token %d, whose part is %.9f to %.9f",
                         valid, cols, draw[r].temperature, (int)draw[r].top_k, draw[r].top_p,
                         draw[r].min_p, u, (int)got, from, to);
        }
        free(copy);
        drop(&x);
        drop(&ids);
    }
}
