/* What the tensors of a checkpoint are, told from their names, whoever wrote them. */
#ifndef BML_FORMATS_NAMES_H
#define BML_FORMATS_NAMES_H

#include "formats/safetensors.h"

/* The parts of GPT-2. First what there is once, then what there is in every layer. */
typedef enum bml_role {
    BML_ROLE_WTE,
    BML_ROLE_WPE,
    BML_ROLE_LN_F_WEIGHT,
    BML_ROLE_LN_F_BIAS,
    BML_ROLE_LM_HEAD,
    BML_ROLE_LN_1_WEIGHT,
    BML_ROLE_LN_1_BIAS,
    BML_ROLE_C_ATTN_WEIGHT,
    BML_ROLE_C_ATTN_BIAS,
    BML_ROLE_C_PROJ_WEIGHT,
    BML_ROLE_C_PROJ_BIAS,
    BML_ROLE_LN_2_WEIGHT,
    BML_ROLE_LN_2_BIAS,
    BML_ROLE_C_FC_WEIGHT,
    BML_ROLE_C_FC_BIAS,
    BML_ROLE_MLP_C_PROJ_WEIGHT,
    BML_ROLE_MLP_C_PROJ_BIAS,
    BML_N_ROLES,
    BML_FIRST_LAYER_ROLE = BML_ROLE_LN_1_WEIGHT
} bml_role;

typedef struct bml_tensor_name {
    bool used;
    bml_role role;       /* if used */
    int layer;           /* if the role is a layer's */
    const char *ignored; /* why, if not used; a constant */
} bml_tensor_name;

/*
 * Reads a tensor's name. In front may stand, in any order, "transformer." (Hugging Face),
 * "_orig_mod." (torch.compile), "module." (DataParallel) and "model.". Layers from N_LAYER on are
 * ignored.
 */
bml_tensor_name bml_tensor_name_read(const char *name, int n_layer);

/* "wte.weight", "attn.c_attn.bias", ...: the name within the model or the layer. */
const char *bml_role_name(bml_role role);

/* The tensors of a checkpoint by what they are; NULL for what it has not. */
typedef struct bml_tensor_map {
    const bml_tensor *top[BML_FIRST_LAYER_ROLE];
    const bml_tensor **layers; /* [n_layer][BML_N_ROLES - BML_FIRST_LAYER_ROLE] */
    int n_layer;
} bml_tensor_map;

/* Two tensors in the same role are an error. The map points into ST. */
bml_status bml_tensor_map_init(bml_tensor_map *map, const bml_safetensors *st, int n_layer,
                               bml_error *err);
void bml_tensor_map_clear(bml_tensor_map *map);

/* LAYER is ignored for roles that are not a layer's. */
const bml_tensor *bml_tensor_map_get(const bml_tensor_map *map, bml_role role, int layer);

#endif
