package dialect

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// abandonedMargin is how much longer than its deliveries may last an idle
// transaction lives before the server ends it: the bound on an owner that is
// alive for TCP but does nothing, such as a stopped process.
const abandonedMargin = 5 * time.Second

const (
	pgBegin  = `BEGIN ISOLATION LEVEL READ COMMITTED`
	pgCommit = `COMMIT`

	pgDelete = `DELETE FROM {messages} WHERE id = ANY ($2::bigint[]) AND outbox = $1::text`
	pgKeep   = `
UPDATE {messages} SET status = 'delivered', delivered_at = statement_timestamp(), dead_at = NULL, scheduled_at = NULL
WHERE id = ANY ($2::bigint[]) AND outbox = $1::text AND status <> 'delivered'`
	pgFail = `
UPDATE {messages} m SET attempts = m.attempts + 1, last_error = u.error, due_at = CASE WHEN m.attempts = 0 THEN COALESCE(m.due_at, m.scheduled_at) ELSE m.due_at END,
	scheduled_at = statement_timestamp() + u.delay * interval '1 microsecond'
FROM unnest($2::bigint[], $3::integer[], $4::bigint[], $5::text[]) AS u(id, attempts, delay, error)
WHERE m.id = u.id AND m.outbox = $1::text AND m.attempts = u.attempts AND m.status = 'pending'`
	pgKill = `
UPDATE {messages} m SET attempts = m.attempts + 1, last_error = u.error,
	status = 'dead', dead_at = statement_timestamp(), scheduled_at = NULL
FROM unnest($2::bigint[], $3::integer[], $4::text[]) AS u(id, attempts, error)
WHERE m.id = u.id AND m.outbox = $1::text AND m.attempts = u.attempts AND m.status = 'pending'`
)

// WithPartition implements engine.Storage. It holds one connection of the pool
// while fn runs.
func (p *Postgres) WithPartition(ctx context.Context, lane engine.Lane, fn func(context.Context, engine.Claim) error) error {
	t, err := p.table(lane.Outbox)
	if err != nil {
		return err
	}
	return p.withWire(ctx, func(wire pgWire) (clean bool, err error) {
		c := &pgClaim{wire: wire, table: t, lane: lane, native: p.pgx}
		defer c.letGo(context.WithoutCancel(ctx)) // also where fn panics
		if err = fn(ctx, c); err == nil {
			err = c.end(ctx)
		} else {
			c.letGo(context.WithoutCancel(ctx))
		}
		return !c.open, err
	})
}

// pgClaim is a worker's hold on a lane: a transaction with the lane's lock,
// from one fetch to the next.
type pgClaim struct {
	wire    pgWire
	table   *pgTable
	lane    engine.Lane
	native  bool
	open    bool // a transaction is open, or the connection is in doubt
	broken  bool // an error came over the wire
	pending engine.Settlement
	lost    atomic.Bool
}

// Fetch implements engine.Claim: settle, commit, begin, lock, read, in one
// packet over pgx. It ends with a SET, which makes the session let go of the
// read's snapshot: while the relay works the transaction holds back no vacuum.
func (c *pgClaim) Fetch(ctx context.Context, q engine.Query) (engine.Page, error) {
	found := &pgPage{lane: c.lane, query: q}
	readOnly := ""
	statements := append(c.closing(),
		pgStatement{sql: pgBegin},
		pgStatement{sql: c.table.sql.own, args: []any{laneOutbox(c.lane.Outbox), c.lane.Partition}, read: readOwn(&readOnly)},
		c.table.fetchStatement(c.native, found),
		pgStatement{sql: fmt.Sprintf("SET LOCAL idle_in_transaction_session_timeout = %d", (q.Lease + abandonedMargin).Milliseconds())},
	)
	err := c.send(ctx, statements)
	c.open = true
	switch {
	case err != nil:
		return engine.Page{}, c.failed(fmt.Errorf("fetch: %w", err))
	case readOnly == "on":
		return engine.Page{}, errors.New("fetch: the server is read-only, so a delivery could not be recorded")
	}
	c.pending = engine.Settlement{}
	return found.page(c.table)
}

// readOwn reads what pgOwn returns, of which only one thing matters here.
func readOwn(readOnly *string) func(pgRows) error {
	return func(rows pgRows) error {
		var owner, ignored string
		for rows.Next() {
			if err := rows.Scan(&owner, readOnly, &ignored, &ignored, &ignored, &ignored, &ignored, &ignored, &ignored); err != nil {
				return err
			}
		}
		return rows.Err()
	}
}

// Settle implements engine.Claim.
func (c *pgClaim) Settle(s engine.Settlement) { c.pending = s }

// closing gives the statements that end the open transaction, if there is one.
func (c *pgClaim) closing() []pgStatement {
	if !c.open {
		return nil
	}
	return append(c.table.settlement(c.native, c.lane.Outbox, c.pending), pgStatement{sql: pgCommit})
}

// end settles and lets go of the lane.
func (c *pgClaim) end(ctx context.Context) error {
	if !c.open || c.broken {
		return nil
	}
	if err := c.send(ctx, c.closing()); err != nil {
		return c.failed(err)
	}
	c.open = false
	return nil
}

// letGo ends the transaction, if one is open still, with nothing settled.
func (c *pgClaim) letGo(ctx context.Context) {
	c.pending = engine.Settlement{}
	_ = c.end(ctx) // the connection is closed then, which does the same
}

func (c *pgClaim) send(ctx context.Context, statements []pgStatement) error {
	if c.lost.Load() {
		c.broken = true
		return engine.ErrOwnershipLost
	}
	err := c.wire.send(ctx, statements)
	c.broken = c.broken || err != nil
	return err
}

// failed says what an error means for what should have been settled.
func (c *pgClaim) failed(err error) error {
	if c.pending.Empty() {
		return err
	}
	return &engine.SettleError{Settlement: c.pending, Err: err}
}

// Alive implements engine.Claim.
func (c *pgClaim) Alive(ctx context.Context) error {
	if c.lost.Load() {
		return engine.ErrOwnershipLost
	}
	if err := c.wire.ping(ctx); err != nil {
		c.lost.Store(true)
		return fmt.Errorf("%w: %w", engine.ErrOwnershipLost, err)
	}
	return nil
}

// Watch implements engine.Claim.
func (c *pgClaim) Watch(lost func()) (stop func()) {
	return c.wire.watch(func() {
		c.lost.Store(true)
		lost()
	})
}

// settlement gives the statements that record what became of messages.
func (t *pgTable) settlement(native bool, outbox string, s engine.Settlement) []pgStatement {
	var statements []pgStatement
	if len(s.Delivered) > 0 {
		text := t.sql.delete
		if s.Keep {
			text = t.sql.keep
		}
		statements = append(statements, pgStatement{sql: text, args: []any{outbox, array(native, s.Delivered)}})
	}
	if len(s.Failed) > 0 {
		ids, attempts, delays, texts := failures(s.Failed)
		statements = append(statements, pgStatement{sql: t.sql.fail, args: []any{
			outbox, array(native, ids), array(native, attempts), array(native, delays), array(native, texts),
		}})
	}
	if len(s.Dead) > 0 {
		ids, attempts, _, texts := failures(s.Dead)
		statements = append(statements, pgStatement{sql: t.sql.kill, args: []any{
			outbox, array(native, ids), array(native, attempts), array(native, texts),
		}})
	}
	return statements
}

// failures turns rows into columns.
func failures(list []engine.Failure) (ids []int64, attempts []int32, delays []int64, texts []string) {
	for _, f := range list {
		ids = append(ids, f.ID)
		attempts = append(attempts, int32(f.Attempts))
		delays = append(delays, f.Delay.Microseconds())
		texts = append(texts, f.Error)
	}
	return ids, attempts, delays, texts
}

// Settle implements engine.Storage.
func (p *Postgres) Settle(ctx context.Context, outbox string, s engine.Settlement) error {
	t, err := p.table(outbox)
	if err != nil || s.Empty() {
		return err
	}
	err = p.withWire(ctx, func(wire pgWire) (clean bool, err error) {
		statements := append([]pgStatement{{sql: pgBegin}}, t.settlement(p.pgx, outbox, s)...)
		err = wire.send(ctx, append(statements, pgStatement{sql: pgCommit}))
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("settle: %w", err)
	}
	return nil
}
