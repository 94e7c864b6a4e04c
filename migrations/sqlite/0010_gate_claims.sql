-- The gate's claims: one row per payment that a seller was shown, for ever. What makes a payment buy one thing once, over
-- all replicas, is the primary key. Times are unix milliseconds of the process, never behind the newest event.
CREATE TABLE claims (
    -- SHA-256 over network, asset, payer and nonce.
    identity        BLOB   NOT NULL PRIMARY KEY CHECK (length(identity) = 32),
    state           TEXT   NOT NULL
        CHECK (state IN ('claimed', 'settling', 'settled', 'unknown', 'released', 'failed')),
    -- Kind and key of the item: tool:search.
    scope           TEXT   NOT NULL CHECK (scope <> ''),
    -- SHA-256 of method, target and arguments: what was bought.
    call_hash       BLOB   NOT NULL CHECK (length(call_hash) = 32),
    -- The two proofs of being the payer, hashed. What is on the chain proves nothing.
    identifier_hash BLOB   CHECK (length(identifier_hash) = 32),
    session_hash    BLOB   CHECK (length(session_hash) = 32),
    -- What the chain is asked with.
    network         TEXT   NOT NULL CHECK (network <> ''),
    payer           TEXT   NOT NULL CHECK (payer <> ''),
    nonce           TEXT   NOT NULL CHECK (nonce <> ''),
    -- The last ledger (Stellar) or second (EVM) in which the authorization can settle.
    dies_at         INTEGER NOT NULL CHECK (dies_at >= 0),
    -- The newest ledger (Stellar) or second (EVM) when it was first seen; 0 where that was not known. It never changes.
    seen_at         INTEGER NOT NULL CHECK (seen_at >= 0),
    -- The requirements, frozen: what is settled, whatever the prices are by then.
    offer           TEXT   NOT NULL CHECK (offer <> ''),
    -- Whoever works on it. Every change of state names the token.
    lease_token     BLOB   CHECK (length(lease_token) = 16),
    lease_until     INTEGER,
    settles         INTEGER NOT NULL DEFAULT 0 CHECK (settles >= 0),
    runs            INTEGER NOT NULL DEFAULT 0 CHECK (runs >= 0),
    -- Sealed.
    settle_request  BLOB,
    receipt         TEXT,
    reason          TEXT   CHECK (reason <> ''),
    answer          TEXT   NOT NULL DEFAULT 'none'
        CHECK (answer IN ('none', 'kept', 'asks', 'too_large')),
    -- Settled by the chain's evidence after it had failed: its identifier may be another claim's by then.
    late            INTEGER NOT NULL DEFAULT 0 CHECK (late IN (0, 1)),
    -- When somebody looks at it again.
    due             INTEGER NOT NULL,
    created         INTEGER NOT NULL,
    changed         INTEGER NOT NULL,
    CHECK ((lease_token IS NULL) = (lease_until IS NULL)),
    CHECK (state NOT IN ('claimed', 'settling') OR lease_token IS NOT NULL),
    CHECK (state NOT IN ('settling', 'unknown') OR settle_request IS NOT NULL AND settles > 0),
    CHECK (state <> 'settled' OR receipt IS NOT NULL)
) STRICT;
-- An identifier names one payment at a time; one that was given back may be used with another.
CREATE UNIQUE INDEX claims_identifier ON claims (identifier_hash, scope)
    WHERE identifier_hash IS NOT NULL AND state IN ('claimed', 'settling', 'unknown', 'settled') AND late = 0;
CREATE INDEX claims_due ON claims (due) WHERE state IN ('claimed', 'settling', 'unknown');

-- What a payment bought, sealed, for a while; a round is a request with its inputResponses and requestState.
CREATE TABLE paid_answers (
    identity   BLOB   NOT NULL REFERENCES claims (identity),
    round_hash BLOB   NOT NULL CHECK (length(round_hash) = 32),
    sealed     BLOB   NOT NULL,
    expires    INTEGER NOT NULL,
    PRIMARY KEY (identity, round_hash)
) STRICT;
CREATE INDEX paid_answers_expires ON paid_answers (expires);

-- Every change of state, append-only.
CREATE TABLE claim_events (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    identity   BLOB   NOT NULL,
    at         INTEGER NOT NULL,
    from_state TEXT  ,
    to_state   TEXT   NOT NULL,
    reason     TEXT   CHECK (reason <> '')
) STRICT;
CREATE INDEX claim_events_identity ON claim_events (identity, id);
CREATE TRIGGER claim_events_no_update BEFORE UPDATE ON claim_events
BEGIN
    SELECT RAISE(ABORT, 'claim_events is append-only');
END;
CREATE TRIGGER claim_events_no_delete BEFORE DELETE ON claim_events
BEGIN
    SELECT RAISE(ABORT, 'claim_events is append-only');
END;
