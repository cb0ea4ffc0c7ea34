/* Backends, plug-ins and tuning. */
#include "expect.h"

static void test_backends(void) {
  char text[1024];
  size_t size = 0;
  ClattnPlugin* plugin = NULL;
  EXPECT_OK(clattn_list_attn_backends(text, sizeof text, &size));
  EXPECT(strncmp(text, "FLASHINFER\n", 11) == 0 && size == strlen(text) + 1);
  EXPECT_INVALID(clattn_list_attn_backends(NULL, 4, NULL), "text is null");
  EXPECT_OK(clattn_plugin_load(CLATTN_PLUGIN_DIR "/none.so", 0, &plugin));
  EXPECT_OK(clattn_list_attn_backends(text, sizeof text, NULL));
  EXPECT(strncmp(text, "FLASHINFER\n", 11) != 0); /* the plug-in comes first */
  clattn_plugin_destroy(plugin);
  EXPECT_OK(clattn_list_attn_backends(text, sizeof text, NULL));
  EXPECT(strncmp(text, "FLASHINFER\n", 11) == 0);
  EXPECT(clattn_plugin_load("/nowhere/none.so", -1, &plugin) == CLATTN_ERROR_IO);
  EXPECT_UNSUPPORTED(clattn_plugin_load(CLATTN_PLUGIN_DIR "/no_entry.so", -1, &plugin), "no_entry");
  EXPECT_INVALID(clattn_plugin_load(NULL, 0, &plugin), "path is null");
  EXPECT_INVALID(clattn_plugin_load(CLATTN_PLUGIN_DIR "/none.so", -2, &plugin),
                 "position is -2, legal: >= -1");
  EXPECT_INVALID(clattn_plugin_load(CLATTN_PLUGIN_DIR "/none.so", 99, &plugin), "99");
  EXPECT_INVALID(clattn_plugin_load(CLATTN_PLUGIN_DIR "/none.so", 0, NULL), "plugin is null");
  clattn_plugin_destroy(NULL);

  EXPECT_OK(clattn_plugin_load(CLATTN_PLUGIN_DIR "/none.so", 0, &plugin));
  EXPECT_OK(clattn_list_attn_backends(text, sizeof text, NULL));
  *strchr(text, '\n') = '\0';
  EXPECT_OK(clattn_unregister_backend(text));
  EXPECT_INVALID(clattn_unregister_backend(text), text);
  EXPECT_INVALID(clattn_unregister_backend(NULL), "name is null");
  clattn_plugin_destroy(plugin);
}

static void test_rows(const Fixture* fixture) {
  const char* const key = "cpu * decode 64 4 f32 f32 * - - - - - - - -";
  const char* const missing = "cpu * decode";
  char text[4096], row[4096], path[64];
  size_t size = 0;
  ClattnContext* context = NULL;
  EXPECT_OK(clattn_tuning_path(text, sizeof text, &size));
  EXPECT(size == strlen(text) + 1);
  EXPECT_INVALID(clattn_tuning_path(NULL, 4, NULL), "text is null");
  EXPECT_OK(clattn_device_classes(fixture->context, text, sizeof text, NULL));
  EXPECT(strstr(text, "cpu\n") != NULL || strstr(text, "gpu\n") != NULL);
  EXPECT_INVALID(clattn_device_classes(NULL, text, sizeof text, NULL), "context is null");
  EXPECT_OK(clattn_tuning_candidates(fixture->context, key, NULL, 0, &size));
  EXPECT(size > 1);
  EXPECT_OK(clattn_tuning_candidates(fixture->context, key, text, sizeof text, NULL));
  EXPECT(strstr(text, "decode") != NULL);
  strcpy(row, text);
  strchr(row, '\n')[1] = '\0';
  EXPECT_INVALID(clattn_tuning_candidates(NULL, key, text, sizeof text, NULL), "context is null");
  EXPECT_INVALID(clattn_tuning_candidates(fixture->context, NULL, text, 1, NULL), "key is null");
  EXPECT_INVALID(clattn_tuning_candidates(fixture->context, "", text, 1, NULL),
                 "key: 0 rows of kernels and 0 of costs, legal: one of a kernel");
  EXPECT_INVALID(clattn_tuning_candidates(fixture->context, missing, text, 1, NULL), "key:2");

  EXPECT_OK(clattn_context_create(NULL, &context)); /* the fixture's layers keep their rows */
  EXPECT_OK(clattn_set_tuning(context, row));
  EXPECT_INVALID(clattn_set_tuning(NULL, row), "context is null");
  EXPECT_INVALID(clattn_set_tuning(context, NULL), "rows is null");
  EXPECT_INVALID(clattn_set_tuning(context, missing), "rows:2");
  clattn_context_destroy(context);
  snprintf(path, sizeof path, "/tmp/clattn_c_api_%d/tuning", (int)(size_t)&path % 10000000);
  EXPECT_OK(clattn_save_tuning(path, row));
  FILE* const file = fopen(path, "r");
  EXPECT(file != NULL);
  if (file != NULL) {
    EXPECT(fgets(text, sizeof text, file) != NULL && strcmp(text, "clattn-tuning 2\n") == 0);
    EXPECT(fgets(text, sizeof text, file) != NULL && strcmp(text, row) == 0);
    fclose(file);
    remove(path);
    *strrchr(path, '/') = '\0';
    remove(path);
  }
  EXPECT_INVALID(clattn_save_tuning(NULL, row), "path is null");
  EXPECT_INVALID(clattn_save_tuning(path, NULL), "rows is null");
  EXPECT_INVALID(clattn_save_tuning(path, missing), "rows:2");
  EXPECT(clattn_save_tuning("/proc/nowhere/tuning", row) == CLATTN_ERROR_IO);
}

void test_tuning(const Fixture* fixture) {
  test_backends();
  test_rows(fixture);
}
