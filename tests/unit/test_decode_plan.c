/*
 * The shares of the CUDA backend's one-launch step (decode_plan.h), which need no GPU: all of the
 * work is somebody's once, what a block's warps read is all of its stream of weights, and what it
 * waits for is what its cluster sends. The loops here are those of decode.cu and decode_few.cu.
 */
#include "testing.h"

#include "backend/cuda/decode_plan.h"

enum {
    CLUSTER = BML_CUDA_CLUSTER,
    TILE = BML_CUDA_ROWS,
    THREADS = 32 * BML_CUDA_WARPS, /* that compute */
    MAX_EMBD = 2048,
    MAX_CLUSTERS = 16,
    RANDOM_PLANS = TEST_SANITIZED ? 100 : 500,
};

/* n_clusters, n_embd, n_head, head_dim, n_inner, vocab_size */
static const bml_cuda_plan gpt2[] = {{16, 768, 12, 64, 3072, 50257},
                                     {16, 1024, 16, 64, 4096, 50257},
                                     {16, 1280, 20, 64, 5120, 50257},
                                     {16, 1600, 25, 64, 6400, 50257}};

static int below(uint64_t *seed, int n)
{
    return (int)(test_random(seed) % (uint64_t)n);
}

static bml_cuda_plan random_plan(uint64_t *seed)
{
    bml_cuda_plan p = {.head_dim = 64 << below(seed, 2)};
    p.n_clusters = 1 + below(seed, MAX_CLUSTERS);
    p.n_head = 1 + below(seed, MAX_EMBD / p.head_dim);
    if (p.n_head * p.head_dim < TILE * CLUSTER)
        p.n_head++;
    p.n_embd = p.n_head * p.head_dim;
    p.n_inner = BML_CUDA_HIDDEN * (1 + below(seed, 512));
    p.vocab_size = 1 + 2 * below(seed, 30000);
    return p;
}

/* Calls CHECK with GPT-2's plans, for all numbers of clusters, and with random ones. */
static void with_plans(void (*check)(const bml_cuda_plan *))
{
    uint64_t seed = 1;
    for (size_t i = 0; i < sizeof gpt2 / sizeof *gpt2; i++)
        for (int n = 1; n <= MAX_CLUSTERS; n++) {
            bml_cuda_plan p = gpt2[i];
            p.n_clusters = n;
            check(&p);
        }
    for (int i = 0; i < RANDOM_PLANS; i++) {
        bml_cuda_plan p = random_plan(&seed);
        check(&p);
    }
}

#define EXPECT(p, truth)                                                                           \
    do {                                                                                           \
        if (!(truth))                                                                              \
            fail_msg("%s: %d clusters, n_embd %d, %d heads, n_inner %d, vocab_size %d", #truth,    \
                     (p)->n_clusters, (p)->n_embd, (p)->n_head, (p)->n_inner, (p)->vocab_size);    \
    } while (0)

/* N things from FIRST on come next after *END. */
static bool follows(int *end, int first, int n)
{
    bool next = first == *end && n >= 0;
    *end = first + n;
    return next;
}

/* The tiles of everything, block after block. */
static void check_shares(const bml_cuda_plan *p)
{
    int hidden = 0, vocab = 0, heads = 0, slice = p->n_embd / TILE / CLUSTER;
    bml_cuda_share most = bml_cuda_most_of(p), seen = {0};
    for (int cluster = 0; cluster < p->n_clusters; cluster++) {
        int qkv = 0, x = 0, n_heads = 0, first = hidden, clusters = 0;
        for (int rank = 0; rank < CLUSTER; rank++) {
            bml_cuda_share s = bml_cuda_share_of(p, cluster * CLUSTER + rank);
            EXPECT(p, s.cluster == cluster && s.rank == rank);
            EXPECT(p, rank == 0 || s.n_heads == n_heads);
            EXPECT(p, follows(&qkv, s.qkv_first, s.qkv_tiles));
            EXPECT(p, follows(&x, s.slice_first, s.slice_tiles));
            EXPECT(p, s.slice_tiles == slice || s.slice_tiles == slice + 1);
            EXPECT(p, follows(&hidden, s.hidden_first, s.hidden_tiles));
            EXPECT(p, follows(&vocab, s.vocab_first, s.vocab_tiles));
            EXPECT(p, s.clusters_first == first);
            EXPECT(p, rank == 0 || s.clusters_tiles == clusters);
            n_heads = s.n_heads;
            clusters = s.clusters_tiles;
            seen.qkv_tiles = bml_cuda_larger(seen.qkv_tiles, s.qkv_tiles);
            seen.slice_tiles = bml_cuda_larger(seen.slice_tiles, s.slice_tiles);
            seen.hidden_tiles = bml_cuda_larger(seen.hidden_tiles, s.hidden_tiles);
            seen.vocab_tiles = bml_cuda_larger(seen.vocab_tiles, s.vocab_tiles);
        }
        EXPECT(p, first + clusters == hidden);
        seen.clusters_tiles = bml_cuda_larger(seen.clusters_tiles, clusters);
        /* The first clusters have heads: add_product counts on it. */
        EXPECT(p, (n_heads > 0) == (cluster < p->n_head));
        EXPECT(p, TILE * qkv == 3 * n_heads * p->head_dim && TILE * x == p->n_embd);
        seen.n_heads = bml_cuda_larger(seen.n_heads, n_heads);
        heads += n_heads;
    }
    EXPECT(p, heads == p->n_head && BML_CUDA_HIDDEN * hidden == p->n_inner);
    EXPECT(p, TILE * vocab >= p->vocab_size && TILE * (vocab - 1) < p->vocab_size);
    EXPECT(p, most.n_heads == seen.n_heads && most.qkv_tiles == seen.qkv_tiles);
    EXPECT(p, most.slice_tiles == seen.slice_tiles && most.hidden_tiles == seen.hidden_tiles);
    EXPECT(p, most.clusters_tiles == seen.clusters_tiles && most.vocab_tiles == seen.vocab_tiles);
}

static void test_shares(void **state)
{
    (void)state;
    with_plans(check_shares);
}

/* The clusters' rows of the first product are all rows, and a tile's lie side by side. */
static void check_rows(const bml_cuda_plan *p)
{
    static unsigned char seen[3 * MAX_EMBD];
    int n = 0;
    memset(seen, 0, sizeof seen);
    for (int cluster = 0; cluster < p->n_clusters; cluster++) {
        int rows = 3 * p->head_dim * bml_cuda_share_of(p, cluster * CLUSTER).n_heads;
        for (int i = 0; i < rows; i++, n++) {
            int row = bml_cuda_qkv_row(p, cluster, i);
            EXPECT(p, row >= 0 && row < 3 * p->n_embd && !seen[row]);
            EXPECT(p, row == bml_cuda_qkv_row(p, cluster, i / TILE * TILE) + i % TILE);
            /* In a head's q, k and v, one behind the other. */
            EXPECT(p, row % p->n_embd / p->head_dim % p->n_clusters == cluster);
            EXPECT(p, row / p->n_embd == i / p->head_dim % 3);
            seen[row] = 1;
        }
    }
    EXPECT(p, n == 3 * p->n_embd);
}

static void test_rows(void **state)
{
    (void)state;
    with_plans(check_rows);
}

/* ---- inboxes ---- */

/* What one block is sent: how often each float, and bytes in all. */
typedef struct inbox {
    unsigned char times[MAX_EMBD * 9]; /* of states, all heads in one cluster */
    int bytes;
} inbox;

static inbox inboxes[CLUSTER];

static void clear_inboxes(void)
{
    memset(inboxes, 0, sizeof inboxes);
}

static void deliver(int rank, int at, int n_floats)
{
    for (int i = 0; i < n_floats; i++)
        inboxes[rank].times[at + i]++;
    inboxes[rank].bytes += 4 * n_floats;
}

/* RANK was sent what it waits for, N floats without gaps from 0 on. */
static bool came(const bml_cuda_plan *p, const bml_cuda_share *s, int which, int n)
{
    const inbox *in = &inboxes[s->rank];
    for (int i = 0; i < n; i++)
        if (in->times[i] != 1)
            return false;
    return in->bytes == 4 * n && in->bytes == bml_cuda_inbox_bytes(p, s, which, true);
}

/* What project_heads(), attend() and expand() send in each cluster, thread after thread. */
static void check_inboxes(const bml_cuda_plan *p)
{
    int d = p->head_dim, sharing = THREADS / d, pitch = bml_cuda_state_pitch(d);
    bml_cuda_share most = bml_cuda_most_of(p), s[CLUSTER];
    for (int cluster = 0; cluster < p->n_clusters; cluster++) {
        for (int rank = 0; rank < CLUSTER; rank++)
            s[rank] = bml_cuda_share_of(p, cluster * CLUSTER + rank);

        clear_inboxes();
        for (int from = 0; from < CLUSTER; from++)
            for (int t = 0; t < THREADS; t++)
                for (int i = t % 32; i < TILE * s[from].qkv_tiles; i += 32)
                    deliver(t / 32, TILE * s[from].qkv_first + i, 1);
        for (int rank = 0; rank < CLUSTER; rank++)
            EXPECT(p, came(p, &s[rank], BML_CUDA_QKV_IN, 3 * s[rank].n_heads * d));

        clear_inboxes();
        for (int from = 0; from < CLUSTER; from++)
            for (int head = 0; head < s[from].n_heads; head++)
                for (int t = 0; t < THREADS; t++)
                    for (int rank = t % sharing; rank < CLUSTER; rank += sharing) {
                        /* Without the gaps that the pitch makes. */
                        int to = (head * CLUSTER + from) * (d + 2), e = t / sharing;
                        deliver(rank, to + e, 1);
                        if (e == 0)
                            deliver(rank, to + d, 2);
                    }
        for (int rank = 0; rank < CLUSTER; rank++)
            EXPECT(p, came(p, &s[rank], BML_CUDA_STATES_IN, s[rank].n_heads * CLUSTER * (d + 2)));
        EXPECT(p, pitch >= d + 2 && pitch % 4 == 0);
        EXPECT(p, 4 * s[0].n_heads * (3 * d + CLUSTER * pitch) <= bml_cuda_inbox_room(p, &most));

        clear_inboxes();
        for (int from = 0; from < CLUSTER; from++)
            for (int t = 0; t < THREADS; t++)
                for (int i = t % 32; i < BML_CUDA_HIDDEN * s[from].hidden_tiles; i += 32)
                    deliver(t / 32,
                            BML_CUDA_HIDDEN * (s[from].hidden_first - s[from].clusters_first) + i,
                            1);
        for (int rank = 0; rank < CLUSTER; rank++)
            EXPECT(p,
                   came(p, &s[rank], BML_CUDA_HIDDEN_IN, BML_CUDA_HIDDEN * s[rank].clusters_tiles));
    }
}

static void test_inboxes(void **state)
{
    (void)state;
    with_plans(check_inboxes);
}

/* ---- the same of several tokens ---- */

enum { FEW = BML_CUDA_FEW };

/* How often each byte was sent of an inbox in which tokens lie PITCH bytes apart. */
static struct {
    unsigned char times[FEW * 2 * (MAX_EMBD * 8)];
    int bytes;
} few_inboxes[CLUSTER];

static void deliver_few(int rank, int at, int bytes)
{
    for (int i = 0; i < bytes; i++)
        few_inboxes[rank].times[at + i]++;
    few_inboxes[rank].bytes += bytes;
}

/* Of N_TOKENS the block was sent BYTES each, where those of N lie, and nothing else; then all is
 * clear again. */
static bool came_few(const bml_cuda_plan *p, const bml_cuda_share *s, int which, int n_tokens,
                     int n, int pitch, int bytes)
{
    bool right = few_inboxes[s->rank].bytes == n * bytes &&
                 few_inboxes[s->rank].bytes == bml_cuda_few_inbox_bytes(p, s, which, n_tokens);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < bytes; i++)
            right = right && few_inboxes[s->rank].times[t * pitch + i] == 1;
    memset(&few_inboxes[s->rank], 0, sizeof few_inboxes[0]);
    return right;
}

/* What share(), project_heads(), attend() and expand() send. */
static void check_few(const bml_cuda_plan *p)
{
    int d = p->head_dim, sharing = THREADS / d, pitch;
    bml_cuda_share most = bml_cuda_most_of(p), s[CLUSTER];
    for (int cluster = 0; cluster < p->n_clusters; cluster++)
        for (int n = 2; n <= FEW; n += 3) {
            for (int rank = 0; rank < CLUSTER; rank++)
                s[rank] = bml_cuda_share_of(p, cluster * CLUSTER + rank);

            pitch = 2 * bml_cuda_few_pitch(p->n_embd);
            int quads = p->n_embd / 4 / BML_CUDA_WARPS;
            for (int from = 0; from < n; from++)
                for (int warp = 0; warp < BML_CUDA_WARPS; warp++)
                    for (int quad = 0; quad < quads; quad++)
                        for (int i = 0; i < CLUSTER / 2; i++)
                            deliver_few(quad % 2 * (CLUSTER / 2) + i,
                                        from * pitch + 16 * ((warp * quads + quad) / 2), 16);
            for (int rank = 0; rank < CLUSTER; rank++)
                EXPECT(p, came_few(p, &s[rank], BML_CUDA_NORMED_IN, n, n, pitch, 2 * p->n_embd));

            for (int from = 0; from < CLUSTER; from++)
                for (int i = 0; i < TILE * s[from].qkv_tiles * FEW; i++)
                    if (i % FEW < n)
                        deliver_few(i % FEW, 4 * (TILE * s[from].qkv_first + i / FEW), 4);
            for (int rank = 0; rank < CLUSTER; rank++)
                EXPECT(p, came_few(p, &s[rank], BML_CUDA_QKV_IN, n, rank < n, 0,
                                   4 * 3 * s[rank].n_heads * d));

            pitch = 2 * bml_cuda_few_pitch(s[0].n_heads * d);
            for (int from = 0; from < n; from++)
                for (int head = 0; head < s[from].n_heads; head++)
                    for (int t = 0; t < THREADS; t++) {
                        int e = t / sharing;
                        for (int rank = t % sharing; rank < CLUSTER && e % 2 == 0; rank += sharing)
                            deliver_few(rank, from * pitch + 2 * (head * d + e), 4);
                    }
            for (int rank = 0; rank < CLUSTER; rank++)
                EXPECT(p, came_few(p, &s[rank], BML_CUDA_STATES_IN, n, n, pitch,
                                   2 * s[rank].n_heads * d));
            EXPECT(p, 4 * 3 * s[0].n_heads * d + FEW * pitch <= bml_cuda_few_inbox_room(p, &most));

            pitch = 2 * bml_cuda_few_hidden_pitch(bml_cuda_hidden_room(&most));
            for (int from = 0; from < CLUSTER; from++)
                for (int i = 0; i < BML_CUDA_HIDDEN * s[from].hidden_tiles * FEW; i++)
                    for (int rank = i / FEW % 4; rank < CLUSTER && i % FEW < n; rank += 4)
                        deliver_few(rank,
                                    i % FEW * pitch +
                                        2 * (BML_CUDA_HIDDEN *
                                                 (s[from].hidden_first - s[from].clusters_first) +
                                             i / (4 * FEW) * 4),
                                    8);
            for (int rank = 0; rank < CLUSTER; rank++)
                EXPECT(p, came_few(p, &s[rank], BML_CUDA_HIDDEN_IN, n, n, pitch,
                                   2 * BML_CUDA_HIDDEN * s[rank].clusters_tiles));
        }
}

static void test_few(void **state)
{
    (void)state;
    uint64_t seed = 3;
    check_few(&gpt2[0]);
    check_few(&gpt2[3]);
    for (int i = 0; i < 5; i++) {
        bml_cuda_plan p = random_plan(&seed);
        check_few(&p);
    }
}

/* ---- streams ---- */

/* Which 16 bytes of a block's stream some warp reads, all of them at most once. */
static struct {
    unsigned char *read;
    size_t n;
} stream;

static void read_unit(const bml_cuda_plan *p, size_t at, int bytes)
{
    EXPECT(p, at % 16 == 0 && bytes % 16 == 0 && at + (size_t)bytes <= 16 * stream.n);
    unsigned char *unit = stream.read + at / 16;
    EXPECT(p, !memchr(unit, 1, (size_t)bytes / 16));
    memset(unit, 1, (size_t)bytes / 16);
}

/* Tiles of rows, as sum_rows() reads them: a stage of first units, one of second ones. */
static void read_rows(const bml_cuda_plan *p, size_t at, int n_tiles, bml_cuda_unit u)
{
    int chunks = bml_cuda_chunks(p);
    for (int tile = 0; tile < n_tiles; tile++)
        for (int half = 0; half < 2; half++) {
            int bytes = half ? u.second_bytes : u.first_bytes;
            for (int warp = 0; warp < BML_CUDA_WARPS; warp++)
                for (int k = warp; k < chunks; k += BML_CUDA_WARPS)
                    read_unit(p, at + (size_t)(k * bytes), bytes);
            at += (size_t)(chunks * bytes);
        }
}

/* A block's stream of a layer: what the warps read of the stages is all of it, and every stage has
 * room. */
static void check_stream(const bml_cuda_plan *p, int block, bml_weight_format format)
{
    bml_cuda_share s = bml_cuda_share_of(p, block), most = bml_cuda_most_of(p);
    bml_cuda_stream at = bml_cuda_stream_of(p, &s, format);
    bml_cuda_unit u = bml_cuda_unit_of(format);
    bml_cuda_unit head = bml_cuda_unit_of(bml_cuda_head_format(format));
    int room = bml_cuda_stage_bytes(p, &most, format), chunks = bml_cuda_chunks(p);
    int both = u.first_bytes + u.second_bytes;

    EXPECT(p, u.first_bytes >= u.second_bytes && head.first_bytes >= head.second_bytes);
    EXPECT(p, chunks * u.first_bytes <= room && chunks * head.first_bytes <= room);
    EXPECT(p, bml_cuda_proj_bytes(&s, u) <= room && room % 16 == 0);
    EXPECT(p, bml_cuda_column_bytes(&s, u, BML_CUDA_STAGE_TILES) <= room);
    EXPECT(p, at.end % 16 == 0);
    stream.n = at.end / 16;
    stream.read = calloc(stream.n + 1, 1);
    assert_non_null(stream.read);

    read_rows(p, 0, s.qkv_tiles, u);
    for (int part = 0; part < bml_cuda_proj_stages(p, &s); part++)
        for (int tile = 0; tile < s.slice_tiles; tile++)
            read_unit(p, at.proj + (size_t)(part * bml_cuda_proj_bytes(&s, u) + tile * both), both);
    read_rows(p, at.expand, s.hidden_tiles, u);
    /* Stages of a few tiles of hidden units each lie one behind the other. */
    for (int k = 0; k < s.clusters_tiles; k++)
        for (int warp = 0; warp < BML_CUDA_WARPS; warp++)
            for (int i = warp; i < s.slice_tiles; i += BML_CUDA_WARPS)
                read_unit(p,
                          at.contract + (size_t)bml_cuda_column_bytes(&s, u, k) +
                              (size_t)(i * u.col_bytes),
                          u.col_bytes);
    EXPECT(p, !memchr(stream.read, 0, stream.n));
    free(stream.read);
}

/* All blocks' streams of a layer are as many bytes as its weights. */
static void check_streams(const bml_cuda_plan *p)
{
    for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_Q4; format++) {
        bml_cuda_unit u = bml_cuda_unit_of((bml_weight_format)format);
        size_t bytes = 0, wide = (size_t)p->n_embd, inner = (size_t)p->n_inner;
        for (int block = 0; block < p->n_clusters * CLUSTER; block++) {
            bml_cuda_share s = bml_cuda_share_of(p, block);
            check_stream(p, block, (bml_weight_format)format);
            bytes += bml_cuda_stream_of(p, &s, (bml_weight_format)format).end;
        }
        size_t chunk = (size_t)(u.first_bytes + u.second_bytes), column = (size_t)u.col_bytes;
        EXPECT(p, bytes == (4 * wide + inner) * wide / (TILE * BML_CUDA_CHUNK) * chunk +
                               inner * wide / (TILE * BML_CUDA_HIDDEN) * column);
    }
}

static void test_streams(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (size_t i = 0; i < sizeof gpt2 / sizeof *gpt2; i++)
        check_streams(&gpt2[i]);
    for (int i = 0; i < RANDOM_PLANS / 10; i++) {
        bml_cuda_plan p = random_plan(&seed);
        check_streams(&p);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares),  cmocka_unit_test(test_rows),
        cmocka_unit_test(test_inboxes), cmocka_unit_test(test_few),
        cmocka_unit_test(test_streams),
    };
    return cmocka_run_group_tests_name("one-launch step, shares", tests, NULL, NULL);
}
