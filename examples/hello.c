/*
 * The smallest useful program with libbml: the built-in model tells the beginning of a story.
 *
 *     cc hello.c $(pkg-config --cflags --libs bml) -o hello && ./hello "Once upon a time"
 */
#include <bml.h>

#include <stdio.h>
#include <string.h>

static bool print_text(void *context, const char *text, size_t length)
{
    return fwrite(text, 1, length, context) == length && fflush(context) == 0;
}

int main(int argc, char **argv)
{
    const char *prompt = argc > 1 ? argv[1] : "Once upon a time";
    bml_error err = {0};
    bml_model *model = NULL;
    bml_session *session = NULL;
    int32_t *ids = NULL;
    size_t n_ids = 0;
    bml_generation made = {0};
    bml_generate_options options = {.sampling = bml_sampling_default(), .max_tokens = 100};
    options.sampling.temperature = 0.8f;
    options.sampling.top_k = 40;
    options.sampling.seed = 1;
    options.on_text = print_text;
    options.context = stdout;

    printf("%s", prompt);
    if (bml_model_load(NULL, NULL, &model, &err) == BML_OK &&
        bml_tokenize(bml_model_get_tokenizer(model), prompt, strlen(prompt), false, &ids, &n_ids,
                     &err) == BML_OK &&
        bml_session_new(model, NULL, &session, &err) == BML_OK)
        bml_generate(session, 0, ids, n_ids, &options, &made, &err);
    printf("\n");
    if (err.code)
        fprintf(stderr, "hello: %s\n", err.message);
    bml_generation_clear(&made);
    bml_session_free(session);
    bml_free(ids);
    bml_model_free(model);
    return err.code ? 1 : 0;
}
