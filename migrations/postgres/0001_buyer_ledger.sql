-- The buyer's ledger. Times are unix milliseconds of tollway_now(). Amounts are atomic units: NUMERIC(78, 0) holds a
-- uint256 exactly. What the program checks is checked here again: the database outlives the program, and others have its
-- password.
--
-- Texts are compared by their bytes (COLLATE "C"). States are TEXT with a CHECK, not enum types: a driver looks enum
-- types up by name, which breaks behind a pooler in transaction mode.

-- The only clock that decides about money: a replica's decides nothing.
CREATE FUNCTION tollway_now() RETURNS BIGINT LANGUAGE sql VOLATILE AS
    'SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint';

CREATE TABLE payments (
    payment_identifier TEXT COLLATE "C" NOT NULL PRIMARY KEY CHECK (payment_identifier ~ '^[0-9a-f]{64}$'),
    -- The random part of the payment identifier.
    id_nonce           BYTEA  NOT NULL CHECK (octet_length(id_nonce) = 16),
    agent              TEXT COLLATE "C" NOT NULL
        CHECK (length(agent) BETWEEN 1 AND 128 AND agent NOT IN ('*', 'total')),
    session            TEXT COLLATE "C" CHECK (length(session) BETWEEN 1 AND 256),
    -- The UTC day and the session in which the hold was made: it settles in these windows, whenever that is.
    day                TEXT COLLATE "C" NOT NULL CHECK (day ~ '^[0-9]{4}-[01][0-9]-[0-3][0-9]$'),
    idempotency_key    TEXT COLLATE "C" CHECK (idempotency_key ~ '^[A-Za-z0-9_-]{16,128}$'),
    -- SHA-256 over ref and arguments.
    call_hash          BYTEA  NOT NULL CHECK (octet_length(call_hash) = 32),
    ref                TEXT   NOT NULL,
    version_hash       TEXT   NOT NULL,
    network            TEXT COLLATE "C" NOT NULL CHECK (network ~ '^.+:.+$'),
    scheme             TEXT   NOT NULL CHECK (scheme <> ''),
    asset              TEXT COLLATE "C" NOT NULL CHECK (asset <> ''),
    payer              TEXT COLLATE "C" NOT NULL CHECK (payer <> ''),
    pay_to             TEXT   NOT NULL CHECK (pay_to <> ''),
    -- NaN is above every number, so the upper bound refuses it too.
    reserved           NUMERIC(78, 0) NOT NULL
        CHECK (reserved > 0
            AND reserved <= 115792089237316195423570985008687907853269984665640564039457584007913129639935),
    settled            NUMERIC(78, 0) CHECK (settled >= 0 AND settled <= reserved),
    -- The authorization, known before anything is signed. Stellar: the nonce as decimal i64, the signature expiration
    -- ledger, and the ledger known at reservation.
    nonce              TEXT COLLATE "C" NOT NULL CHECK (nonce <> ''),
    dead_after         BIGINT NOT NULL CHECK (dead_after >= 0),
    at_ledger          BIGINT NOT NULL CHECK (at_ledger >= 0),
    state              TEXT COLLATE "C" NOT NULL CHECK (state IN ('reserved', 'in_doubt', 'settled', 'released')),
    reason             TEXT   CHECK (reason ~ '^[a-z_]+$'),
    transaction_id     TEXT COLLATE "C" CHECK (transaction_id <> ''),
    -- Of keyless rows: when the answer was handed to a caller's transport.
    answered           BIGINT,
    -- The owner's lease, or that of a recovery or a sweep. The token stays when the lease ends: a repeated statement
    -- knows its own.
    lease_token        BYTEA  NOT NULL CHECK (octet_length(lease_token) = 16),
    lease_expires      BIGINT,
    sign_before        BIGINT NOT NULL,
    -- Sealed: the signed payload with the endpoint, transport, tool, and the inputResponses and requestState last sent.
    payload            BYTEA,
    payload_expires    BIGINT,
    attempts           BIGINT NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    -- When an open row is to be looked at.
    due                BIGINT,
    created            BIGINT NOT NULL,
    updated            BIGINT NOT NULL CHECK (updated >= created),
    CHECK ((state = 'settled') = (settled IS NOT NULL)),
    CHECK (state = 'settled' OR transaction_id IS NULL),
    CHECK (state = 'settled' AND idempotency_key IS NULL OR answered IS NULL),
    CHECK (state <> 'reserved' OR reason IS NULL AND lease_expires IS NOT NULL),
    CHECK (state NOT IN ('in_doubt', 'released') OR reason IS NOT NULL),
    CHECK ((state IN ('reserved', 'in_doubt')) = (due IS NOT NULL)),
    CHECK (state <> 'released' OR payload IS NULL)
);

CREATE UNIQUE INDEX payments_key ON payments (idempotency_key, agent) WHERE idempotency_key IS NOT NULL;
CREATE UNIQUE INDEX payments_nonce ON payments (nonce, payer, asset, network);
-- The duplicate guard of keyless calls.
CREATE UNIQUE INDEX payments_twin ON payments (call_hash, agent)
    WHERE idempotency_key IS NULL AND (state IN ('reserved', 'in_doubt') OR state = 'settled' AND answered IS NULL);
CREATE UNIQUE INDEX payments_transaction ON payments (transaction_id, network)
    WHERE state = 'settled' AND transaction_id IS NOT NULL;
CREATE INDEX payments_open_call ON payments (call_hash, agent) WHERE state IN ('reserved', 'in_doubt');
-- The oldest due first, and of two that are due at once always the same.
CREATE INDEX payments_due ON payments (due, payment_identifier) WHERE state IN ('reserved', 'in_doubt');
CREATE INDEX payments_payload ON payments (payload_expires) WHERE payload IS NOT NULL AND payload_expires IS NOT NULL;
-- Keyless settled payments that nobody was given an answer of: what tidy looks through.
CREATE INDEX payments_unanswered ON payments (updated)
    WHERE state = 'settled' AND idempotency_key IS NULL AND answered IS NULL;
CREATE INDEX payments_agent ON payments (agent, created);
CREATE INDEX payments_created ON payments (created);

-- A row's identity, price and authorization never change, its end is final, and no row goes: keys and nonces are spent
-- for good.
CREATE FUNCTION tollway_payments_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'UPDATE' THEN
        RAISE EXCEPTION 'no payment is removed';
    END IF;
    IF (OLD.payment_identifier, OLD.id_nonce, OLD.agent, OLD.session, OLD.day, OLD.idempotency_key, OLD.call_hash,
        OLD.ref, OLD.version_hash, OLD.network, OLD.scheme, OLD.asset, OLD.payer, OLD.pay_to, OLD.reserved, OLD.nonce,
        OLD.dead_after, OLD.at_ledger, OLD.created)
       IS DISTINCT FROM
       (NEW.payment_identifier, NEW.id_nonce, NEW.agent, NEW.session, NEW.day, NEW.idempotency_key, NEW.call_hash,
        NEW.ref, NEW.version_hash, NEW.network, NEW.scheme, NEW.asset, NEW.payer, NEW.pay_to, NEW.reserved, NEW.nonce,
        NEW.dead_after, NEW.at_ledger, NEW.created) THEN
        RAISE EXCEPTION 'what was reserved does not change';
    END IF;
    IF (OLD.state IN ('settled', 'released') OR NEW.state = 'reserved')
       AND (OLD.state, OLD.settled) IS DISTINCT FROM (NEW.state, NEW.settled) THEN
        RAISE EXCEPTION 'no such transition';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER payments_guard BEFORE UPDATE OR DELETE ON payments
    FOR EACH ROW EXECUTE FUNCTION tollway_payments_guard();
CREATE TRIGGER payments_truncate BEFORE TRUNCATE ON payments
    FOR EACH STATEMENT EXECUTE FUNCTION tollway_payments_guard();

-- `kind` day: `key` is the UTC date; session: the session. Agent `total` is the row of all agents together. Nothing ties
-- `held + spent` to a limit: an operator may set a limit below what is used already.
CREATE TABLE budget_windows (
    agent   TEXT COLLATE "C" NOT NULL,
    network TEXT COLLATE "C" NOT NULL,
    asset   TEXT COLLATE "C" NOT NULL,
    kind    TEXT COLLATE "C" NOT NULL CHECK (kind IN ('day', 'session')),
    key     TEXT COLLATE "C" NOT NULL CHECK (key <> ''),
    held    NUMERIC(78, 0) NOT NULL
        CHECK (held >= 0 AND held <= 115792089237316195423570985008687907853269984665640564039457584007913129639935),
    spent   NUMERIC(78, 0) NOT NULL
        CHECK (spent >= 0 AND spent <= 115792089237316195423570985008687907853269984665640564039457584007913129639935),
    PRIMARY KEY (agent, key, asset, network, kind),
    CHECK (agent <> 'total' OR kind = 'day')
) WITH (fillfactor = 50);

-- `subject`: an agent, `*` (each agent's default) or `total` (all agents together). The smallest that applies wins.
-- network and asset `*` stop every unit of the subject; such a row carries no figure.
CREATE TABLE spend_limits (
    subject     TEXT COLLATE "C" NOT NULL CHECK (length(subject) BETWEEN 1 AND 128),
    network     TEXT COLLATE "C" NOT NULL,
    asset       TEXT COLLATE "C" NOT NULL,
    source      TEXT COLLATE "C" NOT NULL CHECK (source IN ('file', 'resource', 'operator')),
    per_call    NUMERIC(78, 0) CHECK (per_call >= 0 AND per_call <> 'NaN'),
    per_session NUMERIC(78, 0) CHECK (per_session >= 0 AND per_session <> 'NaN'),
    per_day     NUMERIC(78, 0) CHECK (per_day >= 0 AND per_day <> 'NaN'),
    unlimited   BOOLEAN NOT NULL DEFAULT false,
    suspended   BOOLEAN NOT NULL DEFAULT false,
    version     BIGINT  NOT NULL DEFAULT 1 CHECK (version >= 1),
    updated     BIGINT  NOT NULL,
    PRIMARY KEY (subject, network, asset, source),
    CHECK ((network = '*') = (asset = '*')),
    CHECK (network <> '*'
        OR per_call IS NULL AND per_session IS NULL AND per_day IS NULL AND NOT unlimited AND source = 'operator'),
    CHECK (subject <> 'total' OR per_call IS NULL AND per_session IS NULL)
);

-- One per transition, written in its transaction; never changed.
CREATE TABLE payment_events (
    id                 BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    payment_identifier TEXT COLLATE "C" NOT NULL REFERENCES payments (payment_identifier),
    at                 BIGINT NOT NULL,
    event              TEXT COLLATE "C" NOT NULL
        CHECK (event IN ('reserved', 'in_doubt', 'settled', 'released', 'answered', 'transaction', 'late_success',
            'recovery')),
    reason             TEXT,
    amount             NUMERIC(78, 0),
    transaction_id     TEXT,
    evidence           TEXT   CHECK (evidence IN ('receipt', 'chain', 'operator')),
    -- What an operator wrote.
    note               TEXT   CHECK (length(note) BETWEEN 1 AND 500)
);
CREATE INDEX payment_events_payment ON payment_events (payment_identifier, id);
CREATE FUNCTION tollway_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'payment_events is append-only';
END $$;
CREATE TRIGGER payment_events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON payment_events
    FOR EACH STATEMENT EXECUTE FUNCTION tollway_append_only();

-- Sealed answers. Bodies expire, payments stay.
CREATE TABLE outcomes (
    payment_identifier TEXT COLLATE "C" NOT NULL PRIMARY KEY REFERENCES payments (payment_identifier),
    body               BYTEA   NOT NULL,
    -- The seller asked for input: another answer follows.
    unfinished         BOOLEAN NOT NULL,
    created            BIGINT  NOT NULL,
    expires            BIGINT  NOT NULL
);
CREATE INDEX outcomes_expires ON outcomes (expires);

-- Tombstones of ended sessions, by SHA-256 of their identifier, until the session would have expired by itself.
CREATE TABLE sessions_ended (
    session BYTEA  NOT NULL PRIMARY KEY CHECK (octet_length(session) = 32),
    expires BIGINT NOT NULL
);
CREATE INDEX sessions_ended_expires ON sessions_ended (expires);

CREATE TABLE origin_rules (
    origin  TEXT COLLATE "C" NOT NULL PRIMARY KEY CHECK (origin <> ''),
    rule    TEXT   NOT NULL CHECK (rule IN ('allow', 'deny')),
    source  TEXT   NOT NULL CHECK (source IN ('file', 'resource', 'operator')),
    created BIGINT NOT NULL
);

CREATE TABLE recipient_pins (
    origin     TEXT COLLATE "C" NOT NULL,
    network    TEXT COLLATE "C" NOT NULL,
    asset      TEXT COLLATE "C" NOT NULL,
    pay_to     TEXT   NOT NULL CHECK (pay_to <> ''),
    first_seen BIGINT NOT NULL,
    PRIMARY KEY (origin, network, asset)
);

-- The keys of archived payments: spent for ever.
CREATE TABLE spent_keys (
    agent              TEXT COLLATE "C" NOT NULL,
    idempotency_key    TEXT COLLATE "C" NOT NULL,
    payment_identifier TEXT   NOT NULL,
    call_hash          BYTEA  NOT NULL CHECK (octet_length(call_hash) = 32),
    archived           BIGINT NOT NULL,
    PRIMARY KEY (idempotency_key, agent)
);
