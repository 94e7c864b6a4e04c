-- The gate's claims: one row per payment that a seller was shown, for ever. What makes a payment buy one thing once, over
-- all replicas, is the primary key. Times are unix milliseconds of tollway_now(); texts are compared by their bytes.
CREATE TABLE claims (
    -- SHA-256 over network, asset, payer and nonce.
    identity        BYTEA  NOT NULL PRIMARY KEY CHECK (octet_length(identity) = 32),
    state           TEXT   COLLATE "C" NOT NULL
        CHECK (state IN ('claimed', 'settling', 'settled', 'unknown', 'released', 'failed')),
    -- Kind and key of the item: tool:search.
    scope           TEXT   COLLATE "C" NOT NULL CHECK (scope <> ''),
    -- SHA-256 of method, target and arguments: what was bought.
    call_hash       BYTEA  NOT NULL CHECK (octet_length(call_hash) = 32),
    -- The two proofs of being the payer, hashed. What is on the chain proves nothing.
    identifier_hash BYTEA  CHECK (octet_length(identifier_hash) = 32),
    session_hash    BYTEA  CHECK (octet_length(session_hash) = 32),
    -- What the chain is asked with.
    network         TEXT   COLLATE "C" NOT NULL CHECK (network <> ''),
    payer           TEXT   COLLATE "C" NOT NULL CHECK (payer <> ''),
    nonce           TEXT   COLLATE "C" NOT NULL CHECK (nonce <> ''),
    -- The last ledger (Stellar) or second (EVM) in which the authorization can settle.
    dies_at         BIGINT NOT NULL CHECK (dies_at >= 0),
    -- The newest ledger (Stellar) or second (EVM) when it was first seen; 0 where that was not known. It never changes.
    seen_at         BIGINT NOT NULL CHECK (seen_at >= 0),
    -- The requirements, frozen: what is settled, whatever the prices are by then.
    offer           TEXT   NOT NULL CHECK (offer <> ''),
    -- Whoever works on it. Every change of state names the token.
    lease_token     BYTEA  CHECK (octet_length(lease_token) = 16),
    lease_until     BIGINT,
    settles         INTEGER NOT NULL DEFAULT 0 CHECK (settles >= 0),
    runs            INTEGER NOT NULL DEFAULT 0 CHECK (runs >= 0),
    -- Sealed.
    settle_request  BYTEA,
    receipt         TEXT,
    reason          TEXT   CHECK (reason <> ''),
    answer          TEXT   COLLATE "C" NOT NULL DEFAULT 'none'
        CHECK (answer IN ('none', 'kept', 'asks', 'too_large')),
    -- Settled by the chain's evidence after it had failed: its identifier may be another claim's by then.
    late            BOOLEAN NOT NULL DEFAULT FALSE,
    -- When somebody looks at it again.
    due             BIGINT NOT NULL,
    created         BIGINT NOT NULL,
    changed         BIGINT NOT NULL,
    CHECK ((lease_token IS NULL) = (lease_until IS NULL)),
    CHECK (state NOT IN ('claimed', 'settling') OR lease_token IS NOT NULL),
    CHECK (state NOT IN ('settling', 'unknown') OR settle_request IS NOT NULL AND settles > 0),
    CHECK (state <> 'settled' OR receipt IS NOT NULL)
);
-- An identifier names one payment at a time; one that was given back may be used with another.
CREATE UNIQUE INDEX claims_identifier ON claims (identifier_hash, scope)
    WHERE identifier_hash IS NOT NULL AND state IN ('claimed', 'settling', 'unknown', 'settled') AND NOT late;
CREATE INDEX claims_due ON claims (due) WHERE state IN ('claimed', 'settling', 'unknown');

-- What a payment bought, sealed, for a while; a round is a request with its inputResponses and requestState.
CREATE TABLE paid_answers (
    identity   BYTEA  NOT NULL REFERENCES claims (identity),
    round_hash BYTEA  NOT NULL CHECK (octet_length(round_hash) = 32),
    sealed     BYTEA  NOT NULL,
    expires    BIGINT NOT NULL,
    PRIMARY KEY (identity, round_hash)
);
CREATE INDEX paid_answers_expires ON paid_answers (expires);

-- Every change of state, append-only.
CREATE TABLE claim_events (
    id         BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    identity   BYTEA  NOT NULL,
    at         BIGINT NOT NULL,
    from_state TEXT   COLLATE "C",
    to_state   TEXT   COLLATE "C" NOT NULL,
    reason     TEXT   CHECK (reason <> '')
);
CREATE INDEX claim_events_identity ON claim_events (identity, id);
CREATE FUNCTION claim_events_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'claim_events is append-only';
END $$;
CREATE TRIGGER claim_events_keep BEFORE UPDATE OR DELETE ON claim_events
    FOR EACH ROW EXECUTE FUNCTION claim_events_keep();
CREATE TRIGGER claim_events_all BEFORE TRUNCATE ON claim_events
    FOR EACH STATEMENT EXECUTE FUNCTION claim_events_keep();
