#include <fmt/format.h>

#include <algorithm>
#include <clattn/clattn.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cli/attention_call.hpp"
#include "cli/check_attention.hpp"
#include "cli/check_cache_ops.hpp"
#include "cli/check_mla.hpp"
#include "cli/check_packed.hpp"
#include "cli/check_report.hpp"
#include "cli/check_variants.hpp"
#include "cli/commands.hpp"
#include "cli/run.hpp"

namespace clattn::cli {
namespace {

/// The first table: every kind of work through the kernels that the device is given.
bool check_work(const std::shared_ptr<Context>& context, const std::string& backend) {
  CheckReport report;
  check_attention(context, backend, report);
  if (report.num_lines() == 0) fmt::print("nothing ran: no backend takes any of the shapes\n");
  if (backend.empty()) {  // what belongs to no backend
    check_packed(context, report);
    check_mla(context, report);
    check_cache_ops(context, report);
  }
  fmt::print("{} of {} passed on {}\n", report.num_passed(), report.num_lines(),
             context->capabilities().name);
  return report.passed();
}

}  // namespace

void add_check_command(CLI::App& app) {
  struct Arguments {
    std::string device, backend, family;
  };
  auto* command =
      app.add_subcommand("check", "Test every kernel on a device against a double oracle");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("--device", arguments->device, "gpu, cpu, P:D or part of a name");
  command->add_option("--backend", arguments->backend, "Check this backend only");
  std::vector<std::string> families(kVariantFamilies.size());
  std::transform(kVariantFamilies.begin(), kVariantFamilies.end(), families.begin(),
                 [](KernelFamily family) { return std::string(to_string(family)); });
  command
      ->add_option("--family", arguments->family, "Check the variants of this kernel family only")
      ->check(CLI::IsMember(families));
  command->callback([arguments] {
    if (!arguments->backend.empty()) static_cast<void>(backend_named(arguments->backend));
    const std::shared_ptr<Context> context = Context::create(arguments->device);
    const bool work_passed = !arguments->family.empty() || check_work(context, arguments->backend);
    const bool variants_passed = check_variants(context, {arguments->backend, arguments->family});
    if (!work_passed || !variants_passed) throw ExitCode{1};
  });
}

}  // namespace clattn::cli
