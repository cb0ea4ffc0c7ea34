#ifndef CLATTN_CLATTN_TUNING_H
#define CLATTN_CLATTN_TUNING_H

/* Backends, plug-ins and tuning in C (clattn/registry.hpp, clattn/plugin.hpp, clattn/tuning.hpp).
   Rows of tuning are lines of a tuning file, which docs/tuning.md describes. clattn/clattn.h says
   what holds for all handles, structs and errors. Functions are thread-safe. */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/** The names of the registered backends in priority order, a line each. Text as in
   clattn_layer_explain(). */
CLATTN_C_API ClattnResult clattn_list_attn_backends(char* text, size_t capacity, size_t* size);
/** Takes a backend out, built-in ones too; layers that use it stay valid. */
CLATTN_C_API ClattnResult clattn_unregister_backend(const char* name);

/** A backend out of a shared object (clattn/backend_abi.h), registered while this handle lives;
   layers that use it stay valid. */
typedef struct ClattnPlugin ClattnPlugin;
/** Loads `path` and registers its backend at a place of the priority order: 0 = before all others,
   -1 = behind them. CLATTN_ERROR_IO: it cannot be opened. */
CLATTN_C_API ClattnResult clattn_plugin_load(const char* path, int32_t position,
                                             ClattnPlugin** plugin);
CLATTN_C_API void clattn_plugin_destroy(ClattnPlugin* plugin);

/** The user's tuning file as the environment names it; empty = none is used. Text as in
   clattn_layer_explain(). */
CLATTN_C_API ClattnResult clattn_tuning_path(char* text, size_t capacity, size_t* size);
/** Gives a context the rows of this text in place of the user's file; layers and steps that are
   made from now on follow them. CLATTN_ERROR_INVALID_ARGUMENT: a line cannot be read; the text of
   the error names it. */
CLATTN_C_API ClattnResult clattn_set_tuning(ClattnContext* context, const char* rows);
/** Adds the rows to a tuning file, in place of those for the same layers; the folder is made.
   CLATTN_ERROR_IO: it cannot be written. */
CLATTN_C_API ClattnResult clattn_save_tuning(const char* path, const char* rows);
/** Every tile that kernels have for the layers that the row `key` names, and that the device may
   run: a row each. Text as in clattn_layer_explain(). */
CLATTN_C_API ClattnResult clattn_tuning_candidates(const ClattnContext* context, const char* key,
                                                   char* text, size_t capacity, size_t* size);
/** The classes of the device, by which rows for several devices are found, closest first: a line
   each. Text as in clattn_layer_explain(). */
CLATTN_C_API ClattnResult clattn_device_classes(const ClattnContext* context, char* text,
                                                size_t capacity, size_t* size);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
