#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "program/check/checks.hpp"
#include "program/commands.hpp"
#include "program/common/options.hpp"
#include "program/common/text.hpp"
#include "program/run/run.hpp"

namespace clattn::cli {
namespace {

/// The first table: every kind of work through the kernels that the device is given.
void plan_work(const std::shared_ptr<Context>& context, std::string_view backend, CheckPlan& plan) {
  const auto report = std::make_shared<CheckReport>();
  plan_attention(context, backend, *report, plan);
  if (backend.empty()) {  // what belongs to no backend
    plan_forms(context, *report, plan);
    plan_cache_ops(context, *report, plan);
    plan_recurrent(context, *report, plan);
  }
  plan.add({"", {}, [=, &plan] {
              if (report->num_lines() == 0)
                fmt::print("nothing ran: no backend takes any of the shapes\n");
              fmt::print("{} of {} passed on {}\n", report->num_passed(), report->num_lines(),
                         context->capabilities().name);
              if (!report->passed()) plan.fail();
            }});
}

}  // namespace

void add_check_command(CLI::App& app) {
  struct Arguments {
    std::string device, backend, family;
    bool all = false;
  };
  auto* command =
      app.add_subcommand("check", "Test a device's kernels against a double-precision oracle");
  const auto arguments = std::make_shared<Arguments>();
  add_device(*command, arguments->device);
  command->add_option("--backend", arguments->backend, "Check this backend only");
  command
      ->add_option("--family", arguments->family, "Check the variants of this kernel family only")
      ->check(CLI::IsMember(
          names_of(kVariantFamilies, [](KernelFamily family) { return to_string(family); })));
  command->add_flag("--all", arguments->all,
                    "Check every variant, type and option, not only representatives of the kernels "
                    "that the device is given and one row of others that it can run");
  command->callback([arguments] {
    if (!arguments->backend.empty()) arguments->backend = backend_named(arguments->backend).name();
    const std::shared_ptr<Context> context = Context::create(arguments->device);
    CheckPlan plan(arguments->all ? CheckExtent::kAll : CheckExtent::kRepresentatives);
    if (arguments->family.empty()) plan_work(context, arguments->backend, plan);
    plan_variants(context, {arguments->backend, arguments->family}, plan);
    const bool passed = plan.run(std::thread::hardware_concurrency());
    if (!plan.left_out().empty()) {
      fmt::print("checked representatives only; --all checks every variant, type and option:\n");
      for (const auto& [kind, names] : plan.left_out())
        fmt::print("  left out of {}: {}\n", kind, fmt::join(names, "; "));
    }
    if (!passed) throw ExitCode{Status::kFailed};
  });
}

}  // namespace clattn::cli
