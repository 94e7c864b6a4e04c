-- Payments whose story is over and older than the retention leave the tables that a reservation touches. What is not here
-- word for word cannot be removed there. Times are unix milliseconds of tollway_now().
CREATE TABLE payments_archive (
    payment_identifier TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    -- A transaction pays one payment, whenever that was.
    network            TEXT COLLATE "C" NOT NULL,
    transaction_id     TEXT COLLATE "C",
    archived           BIGINT NOT NULL,
    -- The row of payments, and its payment_events, the oldest first.
    payment            JSONB  NOT NULL,
    events             JSONB  NOT NULL CHECK (jsonb_typeof(events) = 'array'),
    CHECK (payment ->> 'payment_identifier' = payment_identifier AND payment ->> 'network' = network
        AND payment ->> 'transaction_id' IS NOT DISTINCT FROM transaction_id),
    CHECK (payment ->> 'state' IN ('settled', 'released') AND payment ->> 'payload' IS NULL)
);
CREATE INDEX payments_archive_transaction ON payments_archive (transaction_id, network)
    WHERE transaction_id IS NOT NULL;

CREATE OR REPLACE FUNCTION tollway_payments_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF EXISTS (SELECT 1 FROM payments_archive a
                   WHERE a.payment_identifier = OLD.payment_identifier AND a.payment = to_jsonb(OLD)) THEN
            RETURN OLD;
        END IF;
        RAISE EXCEPTION 'no payment is removed that is not in the archive';
    END IF;
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

CREATE OR REPLACE FUNCTION tollway_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME;
END $$;
CREATE FUNCTION tollway_events_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM payments_archive a WHERE a.payment_identifier = OLD.payment_identifier
               AND a.events @> jsonb_build_array(to_jsonb(OLD))) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'payment_events is append-only, but for what is in the archive';
END $$;
DROP TRIGGER payment_events_append_only ON payment_events;
CREATE TRIGGER payment_events_append_only BEFORE UPDATE OR TRUNCATE ON payment_events
    FOR EACH STATEMENT EXECUTE FUNCTION tollway_append_only();
CREATE TRIGGER payment_events_archived BEFORE DELETE ON payment_events
    FOR EACH ROW EXECUTE FUNCTION tollway_events_guard();

-- What is archived stays, and a key that was spent stays spent.
CREATE TRIGGER payments_archive_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON payments_archive
    FOR EACH STATEMENT EXECUTE FUNCTION tollway_append_only();
CREATE TRIGGER spent_keys_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON spent_keys
    FOR EACH STATEMENT EXECUTE FUNCTION tollway_append_only();
