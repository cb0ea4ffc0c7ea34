# A formula of the checkout that it lies in, as committed:
#   brew install --HEAD clattn/packaging/homebrew/clattn.rb
class Clattn < Formula
  desc "Paged attention for every OpenCL device"
  head "file://#{File.expand_path("../..", __dir__)}", using: :git, branch: "main"
  license "Apache-2.0"

  depends_on "cmake" => :build
  depends_on "xxhash" => :build
  depends_on "fmt"
  depends_on "opencl-headers"
  depends_on "opencl-icd-loader"

  def install
    system "cmake", "-S", ".", "-B", "build", "-DBUILD_SHARED_LIBS=ON",
           "-DCLATTN_DEVELOPER_MODE=OFF", *std_cmake_args
    system "cmake", "--build", "build"
    system "cmake", "--install", "build"
  end

  test do
    (testpath/"version.c").write <<~C
      #include <clattn/clattn.h>
      int main(void) { return clattn_abi_version() == CLATTN_ABI_VERSION ? 0 : 1; }
    C
    system ENV.cc, "version.c", "-I#{include}", "-I#{Formula["opencl-headers"].opt_include}",
           "-L#{lib}", "-lclattn", "-o", "version"
    system "./version"
  end
end
