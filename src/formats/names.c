#include "formats/names.h"

#include "base/error.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

enum { LAYER_ROLES = BML_N_ROLES - BML_FIRST_LAYER_ROLE };

static const char *const role_names[BML_N_ROLES] = {
    [BML_ROLE_WTE] = "wte.weight",
    [BML_ROLE_WPE] = "wpe.weight",
    [BML_ROLE_LN_F_WEIGHT] = "ln_f.weight",
    [BML_ROLE_LN_F_BIAS] = "ln_f.bias",
    [BML_ROLE_LM_HEAD] = "lm_head.weight",
    [BML_ROLE_LN_1_WEIGHT] = "ln_1.weight",
    [BML_ROLE_LN_1_BIAS] = "ln_1.bias",
    [BML_ROLE_C_ATTN_WEIGHT] = "attn.c_attn.weight",
    [BML_ROLE_C_ATTN_BIAS] = "attn.c_attn.bias",
    [BML_ROLE_C_PROJ_WEIGHT] = "attn.c_proj.weight",
    [BML_ROLE_C_PROJ_BIAS] = "attn.c_proj.bias",
    [BML_ROLE_LN_2_WEIGHT] = "ln_2.weight",
    [BML_ROLE_LN_2_BIAS] = "ln_2.bias",
    [BML_ROLE_C_FC_WEIGHT] = "mlp.c_fc.weight",
    [BML_ROLE_C_FC_BIAS] = "mlp.c_fc.bias",
    [BML_ROLE_MLP_C_PROJ_WEIGHT] = "mlp.c_proj.weight",
    [BML_ROLE_MLP_C_PROJ_BIAS] = "mlp.c_proj.bias",
};

const char *bml_role_name(bml_role role)
{
    return role_names[role];
}

static const char *skip_prefixes(const char *name)
{
    static const char *const prefixes[] = {"transformer.", "_orig_mod.", "module.", "model."};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes;) {
        size_t length = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], length) == 0) {
            name += length;
            i = 0;
        } else {
            i++;
        }
    }
    return name;
}

/* Reads the number and the point of "h.7.rest" after the "h."; NULL if they are not there. */
static const char *read_layer(const char *text, int *layer)
{
    const char *start = text;
    int n = 0;
    /* Seven digits are more layers than any file holds, and fit. "07" is another tensor than "7".
     */
    for (; *text >= '0' && *text <= '9' && text - start < 7; text++)
        n = 10 * n + (*text - '0');
    if (text == start || *text != '.' || (*start == '0' && text - start > 1))
        return NULL;
    *layer = n;
    return text + 1;
}

static bool find_role(const char *name, bml_role first, bml_role end, bml_role *role)
{
    for (bml_role r = first; r < end; r++) {
        if (strcmp(name, role_names[r]) == 0) {
            *role = r;
            return true;
        }
    }
    return false;
}

bml_tensor_name bml_tensor_name_read(const char *name, int n_layer)
{
    bml_tensor_name result = {.ignored = "not part of GPT-2's language model"};
    name = skip_prefixes(name);
    if (strncmp(name, "h.", 2) != 0) {
        result.used = find_role(name, 0, BML_FIRST_LAYER_ROLE, &result.role);
        return result;
    }
    const char *rest = read_layer(name + 2, &result.layer);
    if (!rest)
        return result;
    if (strcmp(rest, "attn.bias") == 0 || strcmp(rest, "attn.masked_bias") == 0)
        result.ignored = "causal mask buffer, not a weight";
    else if (find_role(rest, BML_FIRST_LAYER_ROLE, BML_N_ROLES, &result.role)) {
        result.used = result.layer < n_layer;
        if (!result.used)
            result.ignored = "in a layer beyond the config's n_layer";
    }
    return result;
}

static const bml_tensor **slot(const bml_tensor_map *map, bml_role role, int layer)
{
    if (role < BML_FIRST_LAYER_ROLE)
        return (const bml_tensor **)&map->top[role];
    return &map->layers[(size_t)layer * LAYER_ROLES + (role - BML_FIRST_LAYER_ROLE)];
}

bml_status bml_tensor_map_init(bml_tensor_map *map, const bml_safetensors *st, int n_layer,
                               bml_error *err)
{
    *map = (bml_tensor_map){.n_layer = n_layer};
    size_t slots = (size_t)n_layer * LAYER_ROLES;
    map->layers = bml_calloc(slots, sizeof *map->layers);
    if (!map->layers)
        return bml_fail_memory(err, slots * sizeof *map->layers, "the map of the tensors");
    for (size_t i = 0; i < bml_safetensors_count(st); i++) {
        const bml_tensor *t = bml_safetensors_at(st, i);
        bml_tensor_name name = bml_tensor_name_read(t->name, n_layer);
        if (!name.used)
            continue;
        const bml_tensor **place = slot(map, name.role, name.layer);
        if (*place) {
            bml_status status =
                bml_fail(err, BML_ERR_FORMAT, "%s: tensors \"%s\" and \"%s\" are both %s", t->file,
                         (*place)->name, t->name, skip_prefixes(t->name));
            bml_tensor_map_clear(map);
            return status;
        }
        *place = t;
    }
    return BML_OK;
}

void bml_tensor_map_clear(bml_tensor_map *map)
{
    free(map->layers);
    *map = (bml_tensor_map){0};
}

const bml_tensor *bml_tensor_map_get(const bml_tensor_map *map, bml_role role, int layer)
{
    return *slot(map, role, layer);
}
