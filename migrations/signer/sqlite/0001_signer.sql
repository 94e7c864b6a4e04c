-- The signer's own book: what was signed, what a day has cost, every decision. Times are unix milliseconds. Amounts are
-- atomic units as decimal text: SQLite's integers end at 64 bits.

-- A nonce is signed with one content, for ever.
CREATE TABLE signed_nonces (
    network TEXT    NOT NULL CHECK (network <> ''),
    payer   TEXT    NOT NULL CHECK (payer <> ''),
    nonce   TEXT    NOT NULL CHECK (nonce <> ''),
    -- SHA-256 of the preimage: what was signed.
    digest  BLOB    NOT NULL CHECK (length(digest) = 32),
    at      INTEGER NOT NULL,
    PRIMARY KEY (network, payer, nonce)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER signed_nonces_update BEFORE UPDATE ON signed_nonces
BEGIN
    SELECT RAISE(ABORT, 'a nonce is signed once');
END;
CREATE TRIGGER signed_nonces_delete BEFORE DELETE ON signed_nonces
BEGIN
    SELECT RAISE(ABORT, 'a nonce is signed once');
END;

-- What the signatures of one UTC day may move; it only grows.
CREATE TABLE signed_days (
    network TEXT NOT NULL,
    asset   TEXT NOT NULL,
    day     TEXT NOT NULL CHECK (day GLOB '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]'),
    signed  TEXT NOT NULL CHECK (signed <> '' AND signed NOT GLOB '*[^0-9]*'),
    PRIMARY KEY (network, asset, day)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER signed_days_update BEFORE UPDATE ON signed_days
WHEN NEW.network <> OLD.network OR NEW.asset <> OLD.asset OR NEW.day <> OLD.day
    OR length(NEW.signed) < length(OLD.signed)
    OR length(NEW.signed) = length(OLD.signed) AND NEW.signed < OLD.signed
BEGIN
    SELECT RAISE(ABORT, 'what was signed on a day only grows');
END;
CREATE TRIGGER signed_days_delete BEFORE DELETE ON signed_days
BEGIN
    SELECT RAISE(ABORT, 'what was signed on a day only grows');
END;

-- signed: counted, and then signed. repeated: the same preimage again, not counted again. refused: nothing was counted
-- nor signed. withheld: counted as signed a row before, and then not signed.
CREATE TABLE decisions (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    at         INTEGER NOT NULL,
    decision   TEXT    NOT NULL CHECK (decision IN ('signed', 'repeated', 'refused', 'withheld')),
    reason     TEXT    CHECK (reason <> ''),
    caller     TEXT    NOT NULL CHECK (caller <> ''),
    -- The first characters of the payment's identifier, as the caller says.
    payment    TEXT,
    network    TEXT,
    asset      TEXT,
    payer      TEXT,
    pay_to     TEXT,
    amount     TEXT,
    nonce      TEXT,
    expiration INTEGER,
    CHECK ((decision IN ('signed', 'repeated')) = (reason IS NULL)),
    CHECK (decision = 'refused' OR network IS NOT NULL AND asset IS NOT NULL AND payer IS NOT NULL AND pay_to IS NOT NULL
        AND amount IS NOT NULL AND nonce IS NOT NULL AND expiration IS NOT NULL)
) STRICT;
CREATE TRIGGER decisions_update BEFORE UPDATE ON decisions
BEGIN
    SELECT RAISE(ABORT, 'decisions is append-only');
END;
CREATE TRIGGER decisions_delete BEFORE DELETE ON decisions
BEGIN
    SELECT RAISE(ABORT, 'decisions is append-only');
END;
