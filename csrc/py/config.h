/* config.h - a dict to kvc_config and back. */
#ifndef KVC_PY_CONFIG_H
#define KVC_PY_CONFIG_H

#include "binding.h"

/* A config with arrays of its own. */
typedef struct py_config {
    kvc_config config;
    uint8_t *windowed, *rope_of_layer; /* [n_layers] or NULL */
} py_config;

/* Fills out from a mapping; every field is required but for "windowed" and "rope_of_layer", an
 * unknown key is a ValueError. Whatever it returns, py_config_release frees the arrays. */
bool py_config_parse(py_config *out, PyObject *mapping);
void py_config_release(py_config *config);
/* The same fields as a new dict. */
PyObject *py_config_dict(const kvc_config *config);

#endif
