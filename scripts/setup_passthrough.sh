# The part `passthrough` of scripts/setup, which sources this file: pyfuse3 with the patches of
# patches/, built against a libfuse that knows passthrough. Where that cannot be had, the stock
# pyfuse3 stays, and one line says why; the mount works with it, only slower.
#
# All that is made lies in .deps/: libfuse/ (only where the distribution's is too old), sdists/ with
# pyfuse3's source release and, while it is built, work/. Nothing of the system is replaced.

libfuse_wanted=3.17
libfuse_prefix=$root/.deps/libfuse
sdists=$root/.deps/sdists
work=$root/.deps/work
patches=(patches/pyfuse3-{passthrough,noflush,wait,reuse}.patch)  # in this order
problem=

# cannot REASON: remembers why passthrough is out of reach. Use as `step || cannot "reason"`.
cannot() {
  problem=${problem:-$1}
  return 1
}

setup_passthrough() {
  setup_main
  local stamp
  # Not stamp_of: a change of scripts/setup itself is no reason to compile again.
  stamp=$({ cat requirements/passthrough.txt "${patches[@]}" \
    scripts/setup_passthrough.sh; pin_of pyfuse3 requirements/main.txt; "$python" --version; pwd; } |
    sha256sum | cut -d' ' -f1)
  if has_passthrough && [[ -e .venv/.passthrough-stamp && $(<.venv/.passthrough-stamp) == "$stamp" ]]; then
    return
  fi
  say "pyfuse3 with passthrough, for a mount at the disk's speed (1 to 2 minutes)"
  rm -rf "$work"
  mkdir -p "$work"
  if build_passthrough; then
    echo "$stamp" >.venv/.passthrough-stamp
  else
    say "pyfuse3 stays as it is, $(has_passthrough && echo "an older patched" || echo "the stock") one:" \
      "$problem; the whole log is $log"
  fi
  rm -rf "$work"
}

# Whether .venv's pyfuse3 is patched and finds its libfuse.
has_passthrough() {
  .venv/bin/python -c 'import pyfuse3; pyfuse3.passthrough_enabled' 2>/dev/null
}

build_passthrough() {
  command -v patch >>"$log" || cannot "the command patch is missing" || return
  make_build_tools &&
    find_libfuse &&
    build_pyfuse3 &&
    install_pyfuse3
}

# quietly SECONDS COMMAND...: into the log, with a deadline that only a hang reaches.
quietly() {
  echo "+ ${*:2}" >>"$log"
  timeout "$@" >>"$log" 2>&1
}

make_build_tools() {
  "$python" -m venv "$work/tools" >>"$log" 2>&1 &&
    quietly 300 "$work/tools/bin/python" -m pip install --no-deps -r requirements/passthrough.txt ||
    cannot "its build tools (requirements/passthrough.txt) cannot be installed"
}

# libfuse ------------------------------------------------------------------------------------------

# The distribution's where it is new enough, else our own, which pkg-config is then told of.
find_libfuse() {
  if pkg-config --atleast-version=$libfuse_wanted fuse3 2>/dev/null; then return; fi
  export PKG_CONFIG_PATH=$libfuse_prefix/lib/pkgconfig
  # Some Pythons link with the system's directory of libraries before what pkg-config says.
  export LDFLAGS="-L$libfuse_prefix/lib -Wl,-rpath,$libfuse_prefix/lib"
  if has_own_libfuse; then return; fi
  get_libfuse_source && build_libfuse
}

has_own_libfuse() {
  pkg-config --atleast-version=$libfuse_wanted fuse3 2>/dev/null &&
    [[ $(pkg-config --variable=prefix fuse3) == "$libfuse_prefix" && -e $libfuse_prefix/lib/libfuse3.so ]]
}

# Unpacks the source package of the distribution's newer release as $work/apt/fuse3-*, by an apt
# configuration of our own. Who serves it is read from the machine's own sources, and its signature
# is checked as theirs are.
get_libfuse_source() {
  local id codename host keyring options
  id=$(. /etc/os-release && echo "${ID:-}")
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  [[ $id == debian ]] && command -v apt-get dpkg-source >>"$log" ||
    cannot "libfuse is older than $libfuse_wanted; install a newer libfuse3-dev" || return
  host=$(apt-get --print-uris update 2>>"$log" |
    sed -n "s|^'\(.*\)/dists/$codename/InRelease'.*|\1|p" | head -n 1)
  [[ $host ]] || cannot "apt's sources name no place that has Debian" || return
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  mkdir -p "$work"/apt/lists/partial "$work"/apt/cache/archives/partial
  echo "deb-src [signed-by=$keyring] $host trixie main" >"$work/apt/sources.list"
  options=(-o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache"
    -o "APT::Sandbox::User=$(id -un)" -o Acquire::http::Timeout=20 -o Acquire::Retries=1)
  quietly 300 apt-get "${options[@]}" --error-on=any update &&
    (cd "$work/apt" && quietly 120 apt-get "${options[@]}" source fuse3) ||
    cannot "Debian's newer libfuse cannot be downloaded"
}

build_libfuse() {
  local source=("$work"/apt/fuse3-*/)
  # The helper fusermount3 is not built: root mounts without it, and the system's serves others.
  (PATH=$work/tools/bin:$PATH &&
    quietly 300 meson setup "$work/libfuse" "${source[0]}" --prefix="$libfuse_prefix" --libdir=lib \
      --buildtype=release -Dexamples=false -Dtests=false -Dutils=false -Duseroot=false &&
    quietly 300 ninja -C "$work/libfuse" install) &&
    has_own_libfuse ||
    cannot "libfuse cannot be built"
}

# pyfuse3 ------------------------------------------------------------------------------------------

build_pyfuse3() {
  local pip=("$work/tools/bin/python" -m pip) pin version patch
  pin=$(pin_of pyfuse3 requirements/main.txt)
  version=${pin#pyfuse3==}
  (PATH=$work/tools/bin:$PATH &&
    quietly 300 "${pip[@]}" download --no-binary :all: --no-deps --no-build-isolation \
      --dest "$sdists" "$pin" &&
    quietly 60 tar -xf "$sdists/pyfuse3-$version.tar.gz" -C "$work") ||
    cannot "the source of pyfuse3 $version cannot be downloaded" || return
  for patch in "${patches[@]}"; do
    quietly 60 patch --directory="$work/pyfuse3-$version" --strip=1 --fuzz=0 --batch \
      --input="$root/$patch" ||
      cannot "$patch does not fit pyfuse3 $version" || return
  done
  (export PATH=$work/tools/bin:$PATH CFLAGS="-O2 -DNDEBUG -g0" \
    SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PYFUSE3="$version+passthrough" &&
    quietly 900 "${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$work/wheel" \
      "$work/pyfuse3-$version") ||
    cannot "the patched pyfuse3 cannot be compiled"
}

# The wheel takes the stock one's place only once it was seen to load.
install_pyfuse3() {
  quietly 120 .venv/bin/python -m pip install --no-deps --target "$work/trial" "$work"/wheel/*.whl &&
    PYTHONPATH=$work/trial quietly 60 .venv/bin/python -c 'import pyfuse3; pyfuse3.passthrough_enabled' ||
    cannot "the patched pyfuse3 does not load" || return
  quietly 120 .venv/bin/python -m pip install --no-deps --force-reinstall "$work"/wheel/*.whl &&
    has_passthrough ||
    cannot "the patched pyfuse3 cannot be installed"
}
