/* config.json: defaults, every key, every way of being wrong. */
#include "containers.h"

#include "formats/hf_config.h"

static bml_status parse(const char *text, bml_hf_config *config, bml_error *err)
{
    return bml_hf_config_parse(text, strlen(text), "dir/config.json", config, err);
}

static void defaults(void **state)
{
    (void)state;
    bml_hf_config c;
    assert_int_equal(parse("{\"model_type\":\"gpt2\"}", &c, NULL), BML_OK);
    assert_int_equal(c.n_layer, 12);
    assert_int_equal(c.n_head, 12);
    assert_int_equal(c.n_embd, 768);
    assert_int_equal(c.n_inner, 3072);
    assert_int_equal(c.n_positions, 1024);
    assert_int_equal(c.vocab_size, 50257);
    assert_true(c.layer_norm_epsilon == 1e-5f);
    assert_int_equal(c.activation, BML_ACT_GELU_TANH);
    assert_true(c.scale_attn_weights);
    assert_false(c.scale_attn_by_inverse_layer_idx);
    assert_true(c.tie_word_embeddings);
    assert_int_equal(c.bos_token_id, 50256);
    assert_int_equal(c.eos_token_id, 50256);
}

static void every_key(void **state)
{
    (void)state;
    bml_hf_config c;
    assert_int_equal(
        parse(
            "{\"architectures\":[\"GPT2LMHeadModel\"],\"n_layer\":3,\"n_head\":5,\"n_embd\":35,"
            "\"n_inner\":11,\"n_positions\":77,\"n_ctx\":99,\"vocab_size\":101,"
            "\"layer_norm_epsilon\":1e-3,\"activation_function\":\"relu\","
            "\"scale_attn_weights\":false,\"scale_attn_by_inverse_layer_idx\":true,"
            "\"reorder_and_upcast_attn\":true,\"tie_word_embeddings\":false,\"bos_token_id\":null,"
            "\"eos_token_id\":0,\"add_cross_attention\":false,\"quantization_config\":null,"
            "\"something_else\":{\"a\":[1]}}",
            &c, NULL),
        BML_OK);
    assert_int_equal(c.n_layer, 3);
    assert_int_equal(c.n_head, 5);
    assert_int_equal(c.n_embd, 35);
    assert_int_equal(c.n_inner, 11);
    assert_int_equal(c.n_positions, 77);
    assert_int_equal(c.vocab_size, 101);
    assert_true(c.layer_norm_epsilon == 1e-3f);
    assert_int_equal(c.activation, BML_ACT_RELU);
    assert_false(c.scale_attn_weights);
    assert_true(c.scale_attn_by_inverse_layer_idx);
    assert_false(c.tie_word_embeddings);
    assert_int_equal(c.bos_token_id, -1);
    assert_int_equal(c.eos_token_id, 0);
}

/* TEXT goes behind "model_type"; FIELD is read from the result. */
#define WITH(keys) "{\"model_type\":\"gpt2\"," keys "}"

static void one_key(void **state)
{
    (void)state;
    bml_hf_config c;
    static const struct {
        const char *text;
        size_t field;
        int value;
    } cases[] = {
        {WITH("\"n_ctx\":64"), offsetof(bml_hf_config, n_positions), 64},
        {WITH("\"n_positions\":32"), offsetof(bml_hf_config, n_positions), 32},
        {WITH("\"max_position_embeddings\":33"), offsetof(bml_hf_config, n_positions), 33},
        {WITH("\"num_hidden_layers\":7"), offsetof(bml_hf_config, n_layer), 7},
        {WITH("\"num_attention_heads\":6"), offsetof(bml_hf_config, n_head), 6},
        {WITH("\"hidden_size\":24"), offsetof(bml_hf_config, n_embd), 24},
        {WITH("\"hidden_size\":24"), offsetof(bml_hf_config, n_inner), 96},
        {WITH("\"n_embd\":24,\"hidden_size\":36"), offsetof(bml_hf_config, n_embd), 24},
        {WITH("\"n_inner\":null"), offsetof(bml_hf_config, n_inner), 3072},
        {WITH("\"eos_token_id\":[5,6]"), offsetof(bml_hf_config, eos_token_id), 5},
        {WITH("\"eos_token_id\":[5,6]"), offsetof(bml_hf_config, more_eos), 6},
        {WITH("\"eos_token_id\":[5,50257]"), offsetof(bml_hf_config, more_eos), -1},
        {WITH("\"eos_token_id\":5"), offsetof(bml_hf_config, more_eos), -1},
        {WITH("\"eos_token_id\":[]"), offsetof(bml_hf_config, eos_token_id), -1},
        {WITH("\"eos_token_id\":-1"), offsetof(bml_hf_config, eos_token_id), -1},
        {WITH("\"eos_token_id\":50257"), offsetof(bml_hf_config, eos_token_id), -1},
        {WITH("\"bos_token_id\":0"), offsetof(bml_hf_config, bos_token_id), 0},
        {WITH("\"vocab_size\":9"), offsetof(bml_hf_config, bos_token_id), -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bml_error err = {0};
        if (parse(cases[i].text, &c, &err))
            fail_msg("%s: %s", cases[i].text, err.message);
        int value;
        memcpy(&value, (char *)&c + cases[i].field, sizeof value);
        if (value != cases[i].value)
            fail_msg("%s: %d, not %d", cases[i].text, value, cases[i].value);
    }
}

static void activations(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        bml_activation activation;
    } cases[] = {
        {"gelu_new", BML_ACT_GELU_TANH},
        {"gelu_fast", BML_ACT_GELU_TANH},
        {"gelu_pytorch_tanh", BML_ACT_GELU_TANH},
        {"gelu", BML_ACT_GELU_ERF},
        {"relu", BML_ACT_RELU},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[100];
        snprintf(text, sizeof text, WITH("\"activation_function\":\"%s\""), cases[i].name);
        bml_hf_config c;
        assert_int_equal(parse(text, &c, NULL), BML_OK);
        assert_int_equal(c.activation, cases[i].activation);
    }
}

static void architectures(void **state)
{
    (void)state;
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"{\"architectures\":[\"GPT2LMHeadModel\"]}", NULL},
        {"{\"architectures\":[\"GPT2Model\"],\"model_type\":\"gpt2\"}", NULL},
        {"{\"architectures\":[\"X\",\"GPT2LMHeadModel\"]}", NULL},
        {"{\"architectures\":null,\"model_type\":\"gpt2\"}", NULL},
        {"{\"architectures\":[],\"model_type\":\"gpt2\"}", NULL},
        {"{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\"}",
         "the model is a LlamaForCausalLM; only GPT-2"},
        {"{\"architectures\":[\"GPT2ForSequenceClassification\"],\"model_type\":\"gpt2\"}",
         "GPT2ForSequenceClassification"},
        {"{\"architectures\":[\"GPT2LMHeadModel\"],\"model_type\":\"gpt_bigcode\"}", "gpt_bigcode"},
        {"{\"model_type\":\"llama\"}", "the model is a llama"},
        {"{\"n_layer\":2}", "neither \"architectures\" nor \"model_type\""},
        {"{}", "neither \"architectures\" nor \"model_type\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bml_hf_config c;
        bml_error err = {0};
        bml_status status = parse(cases[i].text, &c, &err);
        if (cases[i].error)
            check_error(&err, status, BML_ERR_UNSUPPORTED, cases[i].error);
        else if (status)
            fail_msg("%s: %s", cases[i].text, err.message);
    }
}

static void errors(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bml_status status;
        const char *error;
    } cases[] = {
        {"", BML_ERR_FORMAT, "dir/config.json: invalid JSON at line 1"},
        {"{\n\"n_layer\": oops}", BML_ERR_FORMAT, "invalid JSON at line 2"},
        {"{} {}", BML_ERR_FORMAT, "invalid JSON"},
        {"[1]", BML_ERR_FORMAT, "is an array, not an object"},
        {"version https://git-lfs.github.com/spec/v1", BML_ERR_FORMAT, "git-LFS pointer"},
        {"<!doctype html>", BML_ERR_FORMAT, "HTML page"},
        {WITH("\"n_layer\":99999999999999999999"), BML_ERR_FORMAT, "invalid JSON"},
        {WITH("\"n_layer\":0"), BML_ERR_FORMAT, "\"n_layer\" is 0, not from 1 to 4096"},
        {WITH("\"n_layer\":-3"), BML_ERR_FORMAT, "\"n_layer\" is -3"},
        {WITH("\"n_layer\":4294967297"), BML_ERR_FORMAT, "\"n_layer\" is 4294967297"},
        {WITH("\"n_layer\":\"12\""), BML_ERR_FORMAT, "\"n_layer\" is a string, not an integer"},
        {WITH("\"n_layer\":12.5"), BML_ERR_FORMAT, "\"n_layer\" is a number with a fraction"},
        {WITH("\"n_layer\":null"), BML_ERR_FORMAT, "\"n_layer\" is null, not an integer"},
        {WITH("\"num_hidden_layers\":0"), BML_ERR_FORMAT, "\"num_hidden_layers\" is 0"},
        {WITH("\"n_head\":0"), BML_ERR_FORMAT, "\"n_head\" is 0"},
        {WITH("\"n_head\":7"), BML_ERR_FORMAT, "\"n_embd\" 768 is not a multiple of \"n_head\" 7"},
        {WITH("\"n_head\":1536"), BML_ERR_FORMAT, "is not a multiple"},
        {WITH("\"n_embd\":0"), BML_ERR_FORMAT, "\"n_embd\" is 0"},
        {WITH("\"n_embd\":2147483647"), BML_ERR_FORMAT, "\"n_embd\" is 2147483647"},
        {WITH("\"n_inner\":0"), BML_ERR_FORMAT, "\"n_inner\" is 0"},
        {WITH("\"n_inner\":true"), BML_ERR_FORMAT, "\"n_inner\" is a boolean"},
        {WITH("\"n_inner\":2147483647"), BML_ERR_FORMAT, "\"n_inner\" is 2147483647"},
        {WITH("\"n_positions\":0"), BML_ERR_FORMAT, "\"n_positions\" is 0"},
        {WITH("\"n_positions\":1000000000"), BML_ERR_FORMAT, "\"n_positions\" is 1000000000"},
        {WITH("\"n_ctx\":[]"), BML_ERR_FORMAT, "\"n_ctx\" is an array"},
        {WITH("\"vocab_size\":0"), BML_ERR_FORMAT, "\"vocab_size\" is 0"},
        {WITH("\"vocab_size\":1000000000"), BML_ERR_FORMAT, "\"vocab_size\" is 1000000000"},
        {WITH("\"layer_norm_epsilon\":0"), BML_ERR_FORMAT, "\"layer_norm_epsilon\" is 0"},
        {WITH("\"layer_norm_epsilon\":-1e-5"), BML_ERR_FORMAT, "\"layer_norm_epsilon\" is -1e-05"},
        {WITH("\"layer_norm_epsilon\":1e300"), BML_ERR_FORMAT, "\"layer_norm_epsilon\" is 1e+300"},
        {WITH("\"layer_norm_epsilon\":1e-300"), BML_ERR_FORMAT, "\"layer_norm_epsilon\""},
        {WITH("\"layer_norm_epsilon\":\"1e-5\""), BML_ERR_FORMAT, "is a string, not a number"},
        {WITH("\"layer_norm_epsilon\":NaN"), BML_ERR_FORMAT, "invalid JSON"},
        {WITH("\"activation_function\":\"swish\""), BML_ERR_UNSUPPORTED,
         "\"swish\" is not supported; supported are gelu_new"},
        {WITH("\"activation_function\":1"), BML_ERR_FORMAT, "\"activation_function\" is an int"},
        {WITH("\"scale_attn_weights\":1"), BML_ERR_FORMAT, "\"scale_attn_weights\" is an integer"},
        {WITH("\"scale_attn_by_inverse_layer_idx\":\"true\""), BML_ERR_FORMAT,
         "\"scale_attn_by_inverse_layer_idx\" is a string, not true or false"},
        {WITH("\"reorder_and_upcast_attn\":0"), BML_ERR_FORMAT, "\"reorder_and_upcast_attn\""},
        {WITH("\"tie_word_embeddings\":null"), BML_ERR_FORMAT, "\"tie_word_embeddings\" is null"},
        {WITH("\"add_cross_attention\":true"), BML_ERR_UNSUPPORTED, "\"add_cross_attention\""},
        {WITH("\"add_cross_attention\":2"), BML_ERR_FORMAT, "\"add_cross_attention\" is an"},
        {WITH("\"quantization_config\":{\"quant_method\":\"gptq\"}"), BML_ERR_UNSUPPORTED,
         "method gptq"},
        {WITH("\"quantization_config\":{}"), BML_ERR_UNSUPPORTED, "method not named"},
        {WITH("\"quantization_config\":7"), BML_ERR_UNSUPPORTED, "method not named"},
        {WITH("\"eos_token_id\":[1,2,3,4,5,6,7,8,9]"), BML_ERR_UNSUPPORTED, "at most 8"},
        {WITH("\"eos_token_id\":\"x\""), BML_ERR_FORMAT, "\"eos_token_id\" is a string"},
        {WITH("\"eos_token_id\":[1,\"x\"]"), BML_ERR_FORMAT, "\"eos_token_id\" is a string"},
        {WITH("\"bos_token_id\":2.5"), BML_ERR_FORMAT, "\"bos_token_id\" is a number with"},
        {WITH("\"bos_token_id\":4294967296"), BML_ERR_FORMAT, "which is no token id"},
        {"{\"model_type\":7}", BML_ERR_FORMAT, "\"model_type\" is an integer, not a string"},
        {"{\"architectures\":\"GPT2LMHeadModel\"}", BML_ERR_FORMAT,
         "\"architectures\" is a string"},
        {"{\"architectures\":[1]}", BML_ERR_FORMAT, "\"architectures\" is an integer"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bml_hf_config c;
        memset(&c, 0x5a, sizeof c);
        bml_hf_config before = c;
        bml_error err = {0};
        check_error(&err, parse(cases[i].text, &c, &err), cases[i].status, cases[i].error);
        assert_non_null(strstr(err.message, "dir/config.json"));
        assert_memory_equal(&c, &before, sizeof c); /* nothing written on failure */
        assert_int_equal(parse(cases[i].text, &c, NULL), cases[i].status);
    }
}

static void files(void **state)
{
    (void)state;
    char *dir = make_temp();
    char *path = bml_format("%s/config.json", dir);
    bml_hf_config c;
    bml_error err;
    check_error(&err, bml_hf_config_read(path, &c, &err), BML_ERR_IO, "config.json: cannot open");
    put_text(dir, "config.json", WITH("\"n_layer\":4"));
    assert_int_equal(bml_hf_config_read(path, &c, &err), BML_OK);
    assert_int_equal(c.n_layer, 4);
    free(path);
    remove_tree(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),    cmocka_unit_test(every_key), cmocka_unit_test(one_key),
        cmocka_unit_test(activations), cmocka_unit_test(errors),    cmocka_unit_test(architectures),
        cmocka_unit_test(files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
