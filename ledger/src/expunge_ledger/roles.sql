-- Roles for a ledger on PostgreSQL: run as a superuser in its database, after expunge-ledger init.
-- expunge_owner owns the tables and runs migrations; expunge_ledger works and serves: it adds events
-- and can neither change nor delete them, and deletes only what the ledger itself lets go.
-- Give both a password, or peer authentication, of your own. Running it again changes nothing.
DO $$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'expunge_owner') THEN
    CREATE ROLE expunge_owner LOGIN;
  END IF;
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'expunge_ledger') THEN
    CREATE ROLE expunge_ledger LOGIN;
  END IF;
END
$$;
DO $$
DECLARE name text;
BEGIN
  FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
    EXECUTE format('ALTER TABLE public.%I OWNER TO expunge_owner', name);
    EXECUTE format('REVOKE ALL ON public.%I FROM PUBLIC, expunge_ledger', name);
    EXECUTE format('GRANT SELECT ON public.%I TO expunge_ledger', name);
  END LOOP;
END
$$;
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO expunge_ledger;
GRANT USAGE, CREATE ON SCHEMA public TO expunge_owner;
GRANT INSERT ON events, subjects TO expunge_ledger;
GRANT UPDATE ON book TO expunge_ledger;
GRANT INSERT, UPDATE ON
  models, requests, work, tokens, filings, leases TO expunge_ledger;
GRANT INSERT, UPDATE, DELETE ON releases, secrets, seen TO expunge_ledger;
