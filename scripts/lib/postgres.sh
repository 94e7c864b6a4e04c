# A PostgreSQL server for tests: its own directory, a free port, loopback only, as an unprivileged user when root
# starts it. Sourced by scripts/test, or in a shell of yours (`. scripts/lib/postgres.sh && postgres_start`); exports
# TOLLWAY_TEST_POSTGRES, its URL. It survives the death of a process, not of the machine (fsync is off). A pgbouncer
# stands beside it (pgbouncer.sh).

. "$(dirname "${BASH_SOURCE[0]}")/pgbouncer.sh"

postgres_bin() {
  local candidate
  for candidate in $(command -v initdb || true) /usr/lib/postgresql/*/bin/initdb /usr/pgsql-*/bin/initdb; do
    if [ -x "$candidate" ]; then dirname "$(readlink -f "$candidate")"; return 0; fi
  done
  return 1
}

postgres_start() {
  declare -F missing >/dev/null || missing() { :; }
  if ! pg_bin=$(postgres_bin); then
    missing "PostgreSQL" "the package postgresql (Debian: apt-get install postgresql)"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends postgresql
    fi
    pg_bin=$(postgres_bin) || { echo "scripts/test: PostgreSQL is missing: install the package postgresql" >&2; exit 1; }
  fi
  pg_dir=$(mktemp -d)
  pg_as=()
  if [ "$(id -u)" = 0 ]; then
    local user=nobody
    if id postgres >/dev/null 2>&1; then user=postgres; fi
    chown "$user" "$pg_dir"
    pg_as=(setpriv --reuid="$user" --regid="$(id -g "$user")" --clear-groups env HOME="$pg_dir")
  fi
  (cd "$pg_dir" && "${pg_as[@]}" "$pg_bin/initdb" -D "$pg_dir/data" -U tollway -A trust --no-instructions >"$pg_dir/initdb.log" 2>&1) ||
    { cat "$pg_dir/initdb.log" >&2; exit 1; }
  local port attempt
  for attempt in 1 2 3 4 5; do
    port=$((20000 + (RANDOM % 20000)))
    if (cd "$pg_dir" && "${pg_as[@]}" "$pg_bin/pg_ctl" -D "$pg_dir/data" -w -t 30 -l "$pg_dir/log" \
      -o "-p $port -c listen_addresses=127.0.0.1 -c unix_socket_directories=$pg_dir -c max_connections=400 -c fsync=off" \
      start >/dev/null 2>&1); then
      export TOLLWAY_TEST_POSTGRES="postgresql://tollway@127.0.0.1:$port/postgres"
      pgbouncer_start
      return 0
    fi
  done
  cat "$pg_dir/log" >&2
  exit 1
}

postgres_stop() {
  if [ -n "${pg_dir:-}" ]; then
    pgbouncer_stop
    (cd "$pg_dir" && "${pg_as[@]}" "$pg_bin/pg_ctl" -D "$pg_dir/data" -m immediate stop >/dev/null 2>&1) || true
    rm -rf "$pg_dir"
  fi
}
