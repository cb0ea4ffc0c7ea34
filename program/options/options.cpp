#include <clattn/config_fields.hpp>

#include "program/commands.hpp"

namespace clattn::cli {

void add_options_command(CLI::App& app) {
  app.add_subcommand("options",
                     "Describe every field of a layer's configuration, as a page of Markdown")
      ->callback([] { write_text("-", configuration_page()); });
}

}  // namespace clattn::cli
