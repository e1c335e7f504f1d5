package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/engine"
)

const (
	idleNodes      = 3
	idlePartitions = 32
	idlePoll       = 500 * time.Millisecond // while there is no push
	idlePolls      = 10                     // of one run
	idleSettle     = 3 * time.Second        // until push has slowed the poll down
)

// idle counts what nodes without messages ask the database.
func idle(ctx context.Context, b *bench) error {
	dsn, err := b.postgres(ctx, "idle")
	if err != nil {
		return err
	}
	m, err := newStatementMeter(ctx, b.server.DSN("postgres"), "idle")
	if err != nil {
		return err
	}
	defer m.conn.Close(ctx)
	err = withNodes(ctx, dsn, outbox.Config{Notify: outbox.Off, PollInterval: idlePoll}, func([]*outbox.Instance) error {
		// From the middle of one interval to the middle of another.
		return m.report(ctx, b, "idle-polling", idlePoll/2, idlePoll, idlePolls, b.runs)
	})
	if err != nil {
		return fmt.Errorf("polling: %w", err)
	}
	err = withNodes(ctx, dsn, outbox.Config{}, func(nodes []*outbox.Instance) error {
		for _, in := range nodes {
			if err := awaitPush(ctx, in); err != nil {
				return err
			}
		}
		return m.report(ctx, b, "idle-push", idleSettle, engine.PushPollInterval, 1, 1)
	})
	if err != nil {
		return fmt.Errorf("push: %w", err)
	}
	return nil
}

// withNodes runs fn while the nodes run, each an instance with a pool of its
// own.
func withNodes(ctx context.Context, dsn string, c outbox.Config, fn func([]*outbox.Instance) error) (err error) {
	var nodes []*outbox.Instance
	var pools []*sql.DB
	defer func() {
		for i, pool := range pools {
			if i < len(nodes) {
				err = errors.Join(err, nodes[i].Stop(context.WithoutCancel(ctx)))
			}
			err = errors.Join(err, pool.Close())
		}
	}()
	for range idleNodes {
		db, pool, err := open(dsn)
		if err != nil {
			return err
		}
		pools = append(pools, pool)
		in, err := install(ctx, db, c, outbox.Outbox{Relay: discard{}, Partitions: idlePartitions})
		if err != nil {
			return err
		}
		nodes = append(nodes, in)
		if err := in.Start(ctx); err != nil {
			return err
		}
	}
	return fn(nodes)
}

// statementMeter counts the statements of one database, from another one.
type statementMeter struct {
	conn     *pgx.Conn
	database string
}

func newStatementMeter(ctx context.Context, dsn, database string) (*statementMeter, error) {
	err := execute(ctx, dsn, "CREATE EXTENSION pg_stat_statements",
		"ALTER DATABASE "+pgx.Identifier{database}.Sanitize()+" SET pg_stat_statements.track = 'top'")
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, err
	}
	return &statementMeter{conn: conn, database: database}, nil
}

// usage is what nodes have asked.
type usage struct {
	polls, selfTests, prunings int
	took                       time.Duration // by the polls, in the server
}

// report measures after a while, in runs of a number of poll intervals.
func (m *statementMeter) report(ctx context.Context, b *bench, name string, after, interval time.Duration, polls, runs int) error {
	statements := series{name: name + " statements", unit: "per node, table and poll interval"}
	selfTests := series{name: name + " self-tests", unit: "per node and poll interval"}
	prunings := series{name: name + " prunings", unit: "per node and poll interval"}
	cost := series{name: name + " statement time", unit: "ms"}
	if err := wait(ctx, after); err != nil {
		return err
	}
	for range runs {
		if _, err := m.conn.Exec(ctx, "SELECT pg_stat_statements_reset()"); err != nil {
			return err
		}
		if err := wait(ctx, time.Duration(polls)*interval); err != nil {
			return err
		}
		u, err := m.read(ctx)
		if err != nil {
			return err
		}
		per := float64(idleNodes * polls)
		statements.runs = append(statements.runs, float64(u.polls)/per)
		selfTests.runs = append(selfTests.runs, float64(u.selfTests)/per)
		prunings.runs = append(prunings.runs, float64(u.prunings)/per)
		cost.runs = append(cost.runs, float64(u.took.Microseconds())/1000/float64(max(u.polls, 1)))
	}
	b.add(statements, selfTests, prunings, cost)
	b.atMost(name, statements.median(), 1)
	return nil
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *statementMeter) read(ctx context.Context) (u usage, err error) {
	rows, err := m.conn.Query(ctx, `
SELECT query, calls, total_exec_time FROM pg_stat_statements
WHERE dbid = (SELECT oid FROM pg_database WHERE datname = $1)`, m.database)
	if err != nil {
		return u, err
	}
	defer rows.Close()
	for rows.Next() {
		var query string
		var calls int
		var millis float64
		if err := rows.Scan(&query, &calls, &millis); err != nil {
			return u, err
		}
		switch {
		case strings.Contains(query, "pg_notify") || strings.Contains(query, "LISTEN"):
			u.selfTests += calls
		case strings.Contains(query, "DELETE"):
			u.prunings += calls
		default:
			u.polls += calls
			u.took += time.Duration(millis * float64(time.Millisecond))
		}
	}
	return u, rows.Err()
}
