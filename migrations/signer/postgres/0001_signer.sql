-- The signer's own book: what was signed, what a day has cost, every decision. Times are unix milliseconds of
-- signer_now(). Amounts are atomic units. Texts are compared by their bytes.

CREATE FUNCTION signer_now() RETURNS BIGINT LANGUAGE sql VOLATILE AS
    'SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint';

-- A nonce is signed with one content, for ever.
CREATE TABLE signed_nonces (
    network TEXT COLLATE "C" NOT NULL CHECK (network <> ''),
    payer   TEXT COLLATE "C" NOT NULL CHECK (payer <> ''),
    nonce   TEXT COLLATE "C" NOT NULL CHECK (nonce <> ''),
    -- SHA-256 of the preimage: what was signed.
    digest  BYTEA  NOT NULL CHECK (octet_length(digest) = 32),
    at      BIGINT NOT NULL,
    PRIMARY KEY (network, payer, nonce)
);

-- What the signatures of one UTC day may move; it only grows.
CREATE TABLE signed_days (
    network TEXT COLLATE "C" NOT NULL,
    asset   TEXT COLLATE "C" NOT NULL,
    day     TEXT COLLATE "C" NOT NULL CHECK (day ~ '^[0-9]{4}-[01][0-9]-[0-3][0-9]$'),
    -- NaN is above every number, so the upper bound refuses it too.
    signed  NUMERIC(78, 0) NOT NULL
        CHECK (signed >= 0
            AND signed <= 115792089237316195423570985008687907853269984665640564039457584007913129639935),
    PRIMARY KEY (network, asset, day)
);

-- signed: counted, and then signed. repeated: the same preimage again, not counted again. refused: nothing was counted
-- nor signed. withheld: counted as signed a row before, and then not signed.
CREATE TABLE decisions (
    id         BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         BIGINT NOT NULL,
    decision   TEXT COLLATE "C" NOT NULL CHECK (decision IN ('signed', 'repeated', 'refused', 'withheld')),
    reason     TEXT   CHECK (reason <> ''),
    caller     TEXT   NOT NULL CHECK (caller <> ''),
    -- The first characters of the payment's identifier, as the caller says.
    payment    TEXT,
    network    TEXT COLLATE "C",
    asset      TEXT COLLATE "C",
    payer      TEXT,
    pay_to     TEXT,
    amount     NUMERIC(78, 0),
    nonce      TEXT,
    expiration BIGINT,
    CHECK ((decision IN ('signed', 'repeated')) = (reason IS NULL)),
    CHECK (decision = 'refused' OR network IS NOT NULL AND asset IS NOT NULL AND payer IS NOT NULL AND pay_to IS NOT NULL
        AND amount IS NOT NULL AND nonce IS NOT NULL AND expiration IS NOT NULL)
);

CREATE FUNCTION signer_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME;
END $$;
CREATE TRIGGER signed_nonces_keep BEFORE UPDATE OR DELETE ON signed_nonces FOR EACH ROW EXECUTE FUNCTION signer_keep();
CREATE TRIGGER signed_nonces_all BEFORE TRUNCATE ON signed_nonces FOR EACH STATEMENT EXECUTE FUNCTION signer_keep();
CREATE TRIGGER decisions_keep BEFORE UPDATE OR DELETE ON decisions FOR EACH ROW EXECUTE FUNCTION signer_keep();
CREATE TRIGGER decisions_all BEFORE TRUNCATE ON decisions FOR EACH STATEMENT EXECUTE FUNCTION signer_keep();
CREATE FUNCTION signer_days_grow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'UPDATE' OR NEW.network <> OLD.network OR NEW.asset <> OLD.asset OR NEW.day <> OLD.day
        OR NEW.signed < OLD.signed THEN
        RAISE EXCEPTION 'what was signed on a day only grows';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER signed_days_keep BEFORE UPDATE OR DELETE ON signed_days
    FOR EACH ROW EXECUTE FUNCTION signer_days_grow();
CREATE TRIGGER signed_days_all BEFORE TRUNCATE ON signed_days FOR EACH STATEMENT EXECUTE FUNCTION signer_keep();

-- Never behind the newest decision: a standby that took over may have another clock.
CREATE FUNCTION signer_time() RETURNS BIGINT LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN GREATEST(signer_now(), COALESCE((SELECT d.at FROM decisions d ORDER BY d.id DESC LIMIT 1), 0));
END $$;

CREATE FUNCTION signer_day(unix_ms BIGINT) RETURNS TEXT LANGUAGE sql IMMUTABLE AS
    $$SELECT to_char(to_timestamp(unix_ms / 1000) AT TIME ZONE 'UTC', 'YYYY-MM-DD')$$;

-- One decision: whether the nonce is free and the day has room, and if so both are taken and the decision is written, in
-- one statement of the client, so that no transaction waits for a process. Verdicts: signed, repeated, nonce_reused,
-- day_cap. A trial reads the same and writes nothing.
CREATE FUNCTION signer_reserve(
    p_caller TEXT, p_payment TEXT, p_network TEXT, p_asset TEXT, p_payer TEXT, p_pay_to TEXT, p_amount TEXT,
    p_nonce TEXT, p_expiration BIGINT, p_digest BYTEA, p_per_day TEXT, p_trial BOOLEAN
) RETURNS TABLE (verdict TEXT, in_day TEXT, day_signed TEXT)
LANGUAGE plpgsql VOLATILE SET lock_timeout = '3s' SET search_path FROM CURRENT AS $$
DECLARE
    v_amount NUMERIC := p_amount::NUMERIC;
    v_cap    NUMERIC := p_per_day::NUMERIC;
    v_seen   BYTEA;
    v_now    BIGINT := signer_time();
    v_day    TEXT := signer_day(v_now);
    v_signed NUMERIC := 0;
    v_taken  BIGINT;
    v_says   TEXT;
BEGIN
    -- Each statement below has to see what was committed while it waited for a lock.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the signer decides at READ COMMITTED';
    END IF;
    SELECT n.digest INTO v_seen FROM signed_nonces n
        WHERE n.network = p_network AND n.payer = p_payer AND n.nonce = p_nonce;
    IF v_seen IS NULL AND NOT p_trial THEN
        LOOP
            INSERT INTO signed_days (network, asset, day, signed) VALUES (p_network, p_asset, v_day, 0)
                ON CONFLICT DO NOTHING;
            SELECT d.signed INTO STRICT v_signed FROM signed_days d
                WHERE d.network = p_network AND d.asset = p_asset AND d.day = v_day FOR UPDATE;
            v_now := signer_time();
            -- Midnight may have passed while the row was waited for.
            EXIT WHEN signer_day(v_now) <= v_day;
            v_day := signer_day(v_now);
        END LOOP;
    ELSE
        SELECT d.signed INTO v_signed FROM signed_days d
            WHERE d.network = p_network AND d.asset = p_asset AND d.day = v_day;
        v_signed := COALESCE(v_signed, 0);
    END IF;
    IF v_seen IS NULL AND v_cap IS NOT NULL AND v_signed + v_amount > v_cap THEN
        v_says := 'day_cap';
    ELSIF v_seen IS NULL AND NOT p_trial THEN
        INSERT INTO signed_nonces (network, payer, nonce, digest, at)
            VALUES (p_network, p_payer, p_nonce, p_digest, v_now) ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS v_taken = ROW_COUNT;
        IF v_taken = 1 THEN
            v_says := 'signed';
            UPDATE signed_days d SET signed = d.signed + v_amount
                WHERE d.network = p_network AND d.asset = p_asset AND d.day = v_day RETURNING d.signed INTO v_signed;
        ELSE
            SELECT n.digest INTO STRICT v_seen FROM signed_nonces n
                WHERE n.network = p_network AND n.payer = p_payer AND n.nonce = p_nonce;
        END IF;
    ELSIF v_seen IS NULL THEN
        v_says := 'signed';
        v_signed := v_signed + v_amount;
    END IF;
    IF v_seen IS NOT NULL THEN
        v_says := CASE WHEN v_seen = p_digest THEN 'repeated' ELSE 'nonce_reused' END;
    END IF;
    IF NOT p_trial THEN
        INSERT INTO decisions
            (at, decision, reason, caller, payment, network, asset, payer, pay_to, amount, nonce, expiration)
            VALUES (v_now, CASE WHEN v_says IN ('signed', 'repeated') THEN v_says ELSE 'refused' END,
                CASE WHEN v_says IN ('signed', 'repeated') THEN NULL ELSE v_says END,
                p_caller, p_payment, p_network, p_asset, p_payer, p_pay_to, v_amount, p_nonce, p_expiration);
    END IF;
    RETURN QUERY SELECT v_says, v_day, v_signed::TEXT;
END $$;
