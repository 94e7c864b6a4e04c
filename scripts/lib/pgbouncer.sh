# A pgbouncer in transaction mode before the PostgreSQL of postgres.sh, which starts and stops it: fewer connections to
# the server than clients, so that every transaction may have another session. Exports TOLLWAY_TEST_PGBOUNCER, its URL.

pgbouncer_start() {
  local bouncer
  bouncer=$(PATH="$PATH:/usr/sbin" command -v pgbouncer || true)
  if [ -z "$bouncer" ]; then
    missing "pgbouncer" "the package pgbouncer (Debian: apt-get install pgbouncer)"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends pgbouncer
    fi
    bouncer=$(PATH="$PATH:/usr/sbin" command -v pgbouncer) ||
      { echo "scripts/test: pgbouncer is missing: install the package pgbouncer" >&2; exit 1; }
  fi
  local server="${TOLLWAY_TEST_POSTGRES##*:}" port attempt
  echo '"tollway" ""' >"$pg_dir/users"
  for attempt in 1 2 3 4 5; do
    port=$((20000 + (RANDOM % 20000)))
    cat >"$pg_dir/pgbouncer.ini" <<INI
[databases]
postgres = host=127.0.0.1 port=${server%%/*}
; The same database over connections of their own, for a test that ends them.
apart = host=127.0.0.1 port=${server%%/*} dbname=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $port
unix_socket_dir =
auth_type = trust
auth_file = $pg_dir/users
pool_mode = transaction
default_pool_size = 6
max_client_conn = 1000
pidfile = $pg_dir/pgbouncer.pid
logfile = $pg_dir/pgbouncer.log
INI
    chmod a+r "$pg_dir/users" "$pg_dir/pgbouncer.ini"
    if (cd "$pg_dir" && "${pg_as[@]}" "$bouncer" -q -d "$pg_dir/pgbouncer.ini" >/dev/null 2>&1); then
      for _ in $(seq 50); do
        if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
          export TOLLWAY_TEST_PGBOUNCER="postgresql://tollway@127.0.0.1:$port/postgres"
          return 0
        fi
        sleep 0.1
      done
    fi
  done
  cat "$pg_dir/pgbouncer.log" >&2
  exit 1
}

pgbouncer_stop() {
  if [ -s "$pg_dir/pgbouncer.pid" ]; then kill "$(cat "$pg_dir/pgbouncer.pid")" 2>/dev/null || true; fi
}
