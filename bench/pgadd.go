package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/internal/tables"
)

const (
	addWriters = 8
	addSlice   = 2 * time.Second
)

// order is the row of the business.
type order struct {
	ID       int64
	Customer string
	Total    int64
}

// handInsert adds the row that an Add adds.
const handInsert = `INSERT INTO outboxer_messages (outbox, partitions, partition, group_key, type, payload) VALUES (?, ?, ?, ?, ?, ?)`

// pgAdd compares transactions that add a message.
func pgAdd(ctx context.Context, b *bench) (err error) {
	dsn, err := b.postgres(ctx, "add")
	if err != nil {
		return err
	}
	a, err := newAdder(ctx, dsn)
	if err != nil {
		return err
	}
	defer a.close()
	heard, stop, err := listen(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	for _, add := range []addFunc{a.outbox, a.byHand} { // warm up
		if _, err := a.slice(ctx, add); err != nil {
			return err
		}
	}
	before := heard.Load()
	ratio, err := b.compare("pg-add", "transactions/s",
		func() (float64, error) { return a.slice(ctx, a.outbox) },
		func() (float64, error) { return a.slice(ctx, a.byHand) })
	if err != nil {
		return err
	}
	if heard.Load() == before {
		return errors.New("no notification was heard")
	}
	b.note("pg-add: the listener heard %d notifications in %d runs of %v", heard.Load()-before, b.runs, addSlice)
	b.atLeast("pg-add", ratio, 0.85)
	return nil
}

// listen counts notifications of new messages on a connection of its own.
func listen(ctx context.Context, dsn string) (heard *atomic.Int64, stop func() error, err error) {
	_, pool, err := open(dsn)
	if err != nil {
		return nil, nil, err
	}
	defer pool.Close()
	storage, err := dialect.NewPostgres(pool, dialect.Config{Outboxes: map[string]tables.Name{orders: {Table: outbox.DefaultTable}}})
	if err != nil {
		return nil, nil, err
	}
	channels, err := storage.Channels(ctx)
	if err != nil {
		return nil, nil, err
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range channels {
		if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{c}.Sanitize()); err != nil {
			_ = conn.Close(ctx)
			return nil, nil, err
		}
	}
	heard = new(atomic.Int64)
	listening, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		defer conn.Close(context.WithoutCancel(ctx))
		for {
			if _, err := conn.WaitForNotification(listening); err != nil {
				ended <- err
				return
			}
			heard.Add(1)
		}
	}()
	return heard, func() error {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			return fmt.Errorf("listen: %w", err)
		}
		return nil
	}, nil
}

// adder is both sides of the comparison over one table.
type adder struct {
	with, without *gorm.DB // an instance
	serial        atomic.Int64
	payload       []byte
	dsn           string
	close         func()
}

type addFunc func(ctx context.Context, group string) error

func newAdder(ctx context.Context, dsn string) (*adder, error) {
	with, first, err := open(dsn)
	if err != nil {
		return nil, err
	}
	without, second, err := open(dsn)
	if err != nil {
		return nil, errors.Join(err, first.Close())
	}
	a := &adder{with: with, without: without, payload: payload(), dsn: dsn, close: func() {
		_ = first.Close()
		_ = second.Close()
	}}
	_, err = install(ctx, with, outbox.Config{}, outbox.Outbox{Relay: outbox.Elsewhere})
	if err == nil {
		err = without.AutoMigrate(&order{})
	}
	if err != nil {
		a.close()
		return nil, err
	}
	return a, nil
}

func (a *adder) outbox(ctx context.Context, group string) error {
	return a.with.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&order{Customer: group, Total: 4711}).Error; err != nil {
			return err
		}
		return outbox.Add(tx, outbox.Message{Type: messageType, GroupKey: group, Payload: a.payload})
	})
}

func (a *adder) byHand(ctx context.Context, group string) error {
	return a.without.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&order{Customer: group, Total: 4711}).Error; err != nil {
			return err
		}
		return tx.Exec(handInsert, orders, 1, 0, group, messageType, a.payload).Error
	})
}

// slice runs transactions for a while, on fresh tables, and returns how many
// a second there were.
func (a *adder) slice(ctx context.Context, add addFunc) (float64, error) {
	if err := execute(ctx, a.dsn, "TRUNCATE outboxer_messages, orders", "CHECKPOINT"); err != nil {
		return 0, err
	}
	var (
		done atomic.Int64
		wg   sync.WaitGroup
		errs = make([]error, addWriters)
	)
	begun := time.Now()
	for i := range addWriters {
		wg.Go(func() {
			for errs[i] == nil && time.Since(begun) < addSlice {
				if errs[i] = add(ctx, "group-"+strconv.FormatInt(a.serial.Add(1), 10)); errs[i] == nil {
					done.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return perSecond(int(done.Load()), time.Since(begun)), errors.Join(errs...)
}
