-- The buyer's ledger. Times are unix milliseconds of the ledger's clock. Amounts are atomic units as decimal text
-- without leading zeros: SQLite would turn a big NUMERIC into a REAL, so sums are made in the program, inside the
-- transaction that holds the write lock. Texts with a fixed form are checked here again: the file outlives the program.

CREATE TABLE payments (
    payment_identifier TEXT    NOT NULL PRIMARY KEY
        CHECK (length(payment_identifier) = 64 AND payment_identifier NOT GLOB '*[^0-9a-f]*'),
    -- The random part of the payment identifier.
    id_nonce           BLOB    NOT NULL CHECK (length(id_nonce) = 16),
    agent              TEXT    NOT NULL CHECK (length(agent) BETWEEN 1 AND 128 AND agent NOT IN ('*', 'total')),
    session            TEXT    CHECK (length(session) BETWEEN 1 AND 256),
    -- The UTC day and the session in which the hold was made: it settles in these windows, whenever that is.
    day                TEXT    NOT NULL CHECK (day GLOB '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]'),
    idempotency_key    TEXT
        CHECK (length(idempotency_key) BETWEEN 16 AND 128 AND idempotency_key NOT GLOB '*[^A-Za-z0-9_-]*'),
    -- SHA-256 over ref and arguments.
    call_hash          BLOB    NOT NULL CHECK (length(call_hash) = 32),
    ref                TEXT    NOT NULL,
    version_hash       TEXT    NOT NULL,
    network            TEXT    NOT NULL CHECK (network GLOB '?*:?*'),
    scheme             TEXT    NOT NULL CHECK (scheme <> ''),
    asset              TEXT    NOT NULL CHECK (asset <> ''),
    payer              TEXT    NOT NULL CHECK (payer <> ''),
    pay_to             TEXT    NOT NULL CHECK (pay_to <> ''),
    reserved           TEXT    NOT NULL
        CHECK (reserved GLOB '[1-9]*' AND reserved NOT GLOB '*[^0-9]*' AND length(reserved) <= 78),
    settled            TEXT
        CHECK ((settled = '0' OR settled GLOB '[1-9]*') AND settled NOT GLOB '*[^0-9]*'
            AND (length(settled) < length(reserved) OR length(settled) = length(reserved) AND settled <= reserved)),
    -- The authorization, known before anything is signed. Stellar: the nonce as decimal i64, the signature expiration
    -- ledger, and the ledger known at reservation.
    nonce              TEXT    NOT NULL CHECK (nonce <> ''),
    dead_after         INTEGER NOT NULL CHECK (dead_after >= 0),
    at_ledger          INTEGER NOT NULL CHECK (at_ledger >= 0),
    state              TEXT    NOT NULL CHECK (state IN ('reserved', 'in_doubt', 'settled', 'released')),
    reason             TEXT    CHECK (reason <> '' AND reason NOT GLOB '*[^a-z_]*'),
    transaction_id     TEXT    CHECK (transaction_id <> ''),
    -- Of keyless rows: when the answer was handed to a caller's transport.
    answered           INTEGER,
    -- The owner's lease, or that of a recovery. The token stays when the lease ends: a repeated statement knows its own.
    lease_token        BLOB    NOT NULL CHECK (length(lease_token) = 16),
    lease_expires      INTEGER,
    sign_before        INTEGER NOT NULL,
    -- Sealed: the signed payload with the endpoint, transport, tool, and the inputResponses and requestState last sent.
    payload            BLOB,
    payload_expires    INTEGER,
    attempts           INTEGER NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    -- When an open row is to be looked at.
    due                INTEGER,
    created            INTEGER NOT NULL,
    updated            INTEGER NOT NULL CHECK (updated >= created),
    CHECK ((state = 'settled') = (settled IS NOT NULL)),
    CHECK (state = 'settled' OR transaction_id IS NULL),
    CHECK (state = 'settled' AND idempotency_key IS NULL OR answered IS NULL),
    CHECK (state <> 'reserved' OR reason IS NULL AND lease_expires IS NOT NULL),
    CHECK (state NOT IN ('in_doubt', 'released') OR reason IS NOT NULL),
    CHECK ((state IN ('reserved', 'in_doubt')) = (due IS NOT NULL)),
    CHECK (state <> 'released' OR payload IS NULL)
) STRICT;

CREATE UNIQUE INDEX payments_key ON payments (agent, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE UNIQUE INDEX payments_nonce ON payments (nonce, payer, asset, network);
-- The duplicate guard of keyless calls.
CREATE UNIQUE INDEX payments_twin ON payments (call_hash, agent)
    WHERE idempotency_key IS NULL AND (state IN ('reserved', 'in_doubt') OR state = 'settled' AND answered IS NULL);
CREATE UNIQUE INDEX payments_transaction ON payments (transaction_id, network)
    WHERE state = 'settled' AND transaction_id IS NOT NULL;
CREATE INDEX payments_open_call ON payments (call_hash, agent) WHERE state IN ('reserved', 'in_doubt');
CREATE INDEX payments_due ON payments (due) WHERE state IN ('reserved', 'in_doubt');
CREATE INDEX payments_payload ON payments (payload_expires) WHERE payload IS NOT NULL AND payload_expires IS NOT NULL;
CREATE INDEX payments_agent ON payments (agent, created);

-- A row's identity, price and authorization never change, and no row goes: keys and nonces are spent for good.
CREATE TRIGGER payments_frozen BEFORE UPDATE OF payment_identifier, id_nonce, agent, session, day, idempotency_key,
    call_hash, ref, version_hash, network, scheme, asset, payer, pay_to, reserved, nonce, dead_after, at_ledger, created
    ON payments
BEGIN
    SELECT RAISE(ABORT, 'what was reserved does not change');
END;
CREATE TRIGGER payments_final BEFORE UPDATE OF state, settled ON payments
    WHEN OLD.state IN ('settled', 'released') OR NEW.state = 'reserved'
BEGIN
    SELECT RAISE(ABORT, 'no such transition');
END;

-- `kind` day: `key` is the UTC date; session: the session. Agent `total` is the row of all agents together.
CREATE TABLE budget_windows (
    agent   TEXT NOT NULL,
    network TEXT NOT NULL,
    asset   TEXT NOT NULL,
    kind    TEXT NOT NULL CHECK (kind IN ('day', 'session')),
    key     TEXT NOT NULL CHECK (key <> ''),
    held    TEXT NOT NULL CHECK ((held = '0' OR held GLOB '[1-9]*') AND held NOT GLOB '*[^0-9]*' AND length(held) <= 78),
    spent   TEXT NOT NULL
        CHECK ((spent = '0' OR spent GLOB '[1-9]*') AND spent NOT GLOB '*[^0-9]*' AND length(spent) <= 78),
    PRIMARY KEY (agent, network, asset, kind, key),
    CHECK (agent <> 'total' OR kind = 'day')
) STRICT, WITHOUT ROWID;

-- `subject`: an agent, `*` (each agent's default) or `total` (all agents together). The smallest that applies wins.
-- network and asset `*` stop every unit of the subject; such a row carries no figure.
CREATE TABLE spend_limits (
    subject     TEXT    NOT NULL CHECK (length(subject) BETWEEN 1 AND 128),
    network     TEXT    NOT NULL,
    asset       TEXT    NOT NULL,
    source      TEXT    NOT NULL CHECK (source IN ('file', 'resource', 'operator')),
    per_call    TEXT    CHECK ((per_call = '0' OR per_call GLOB '[1-9]*') AND per_call NOT GLOB '*[^0-9]*'),
    per_session TEXT    CHECK ((per_session = '0' OR per_session GLOB '[1-9]*') AND per_session NOT GLOB '*[^0-9]*'),
    per_day     TEXT    CHECK ((per_day = '0' OR per_day GLOB '[1-9]*') AND per_day NOT GLOB '*[^0-9]*'),
    unlimited   INTEGER NOT NULL DEFAULT 0 CHECK (unlimited IN (0, 1)),
    suspended   INTEGER NOT NULL DEFAULT 0 CHECK (suspended IN (0, 1)),
    version     INTEGER NOT NULL DEFAULT 1 CHECK (version >= 1),
    updated     INTEGER NOT NULL,
    PRIMARY KEY (subject, network, asset, source),
    CHECK ((network = '*') = (asset = '*')),
    CHECK (network <> '*'
        OR per_call IS NULL AND per_session IS NULL AND per_day IS NULL AND unlimited = 0 AND source = 'operator'),
    CHECK (subject <> 'total' OR per_call IS NULL AND per_session IS NULL)
) STRICT, WITHOUT ROWID;

-- One per transition, written in its transaction; never changed.
CREATE TABLE payment_events (
    id                 INTEGER PRIMARY KEY AUTOINCREMENT,
    payment_identifier TEXT    NOT NULL REFERENCES payments (payment_identifier),
    at                 INTEGER NOT NULL,
    event              TEXT    NOT NULL
        CHECK (event IN ('reserved', 'in_doubt', 'settled', 'released', 'answered', 'transaction', 'late_success')),
    reason             TEXT,
    amount             TEXT,
    transaction_id     TEXT,
    evidence           TEXT    CHECK (evidence IN ('receipt', 'chain', 'operator'))
) STRICT;
CREATE INDEX payment_events_payment ON payment_events (payment_identifier, id);
CREATE TRIGGER payment_events_update BEFORE UPDATE ON payment_events
BEGIN
    SELECT RAISE(ABORT, 'payment_events is append-only');
END;
CREATE TRIGGER payment_events_delete BEFORE DELETE ON payment_events
BEGIN
    SELECT RAISE(ABORT, 'payment_events is append-only');
END;

-- Sealed answers. Bodies expire, payments stay.
CREATE TABLE outcomes (
    payment_identifier TEXT    NOT NULL PRIMARY KEY REFERENCES payments (payment_identifier),
    body               BLOB    NOT NULL,
    -- The seller asked for input: another answer follows.
    unfinished         INTEGER NOT NULL CHECK (unfinished IN (0, 1)),
    created            INTEGER NOT NULL,
    expires            INTEGER NOT NULL
) STRICT;
CREATE INDEX outcomes_expires ON outcomes (expires);

-- Tombstones of ended sessions, by SHA-256 of their identifier, until the session would have expired by itself.
CREATE TABLE sessions_ended (
    session BLOB    NOT NULL PRIMARY KEY CHECK (length(session) = 32),
    expires INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_ended_expires ON sessions_ended (expires);

CREATE TABLE origin_rules (
    origin  TEXT    NOT NULL PRIMARY KEY CHECK (origin <> ''),
    rule    TEXT    NOT NULL CHECK (rule IN ('allow', 'deny')),
    source  TEXT    NOT NULL CHECK (source IN ('file', 'resource', 'operator')),
    created INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE recipient_pins (
    origin     TEXT    NOT NULL,
    network    TEXT    NOT NULL,
    asset      TEXT    NOT NULL,
    pay_to     TEXT    NOT NULL CHECK (pay_to <> ''),
    first_seen INTEGER NOT NULL,
    PRIMARY KEY (origin, network, asset)
) STRICT, WITHOUT ROWID;

-- The keys of archived payments: spent for ever.
CREATE TABLE spent_keys (
    agent              TEXT    NOT NULL,
    idempotency_key    TEXT    NOT NULL,
    payment_identifier TEXT    NOT NULL,
    call_hash          BLOB    NOT NULL CHECK (length(call_hash) = 32),
    archived           INTEGER NOT NULL,
    PRIMARY KEY (agent, idempotency_key)
) STRICT, WITHOUT ROWID;
