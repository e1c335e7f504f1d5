package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync/atomic"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/gormoutbox/outbox"
)

const (
	orders      = "orders" // the outbox that is measured
	messageType = "order.placed"
	payloadSize = 256
)

// payload is random, so that nothing can compress it.
func payload() []byte {
	p := make([]byte, payloadSize)
	_, _ = rand.Read(p) // never fails
	return p
}

// quiet is a GORM configuration without a logger.
func quiet() *gorm.Config { return &gorm.Config{Logger: logger.Discard} }

// install makes an instance of the one outbox on db, with its tables.
func install(ctx context.Context, db *gorm.DB, c outbox.Config, o outbox.Outbox) (*outbox.Instance, error) {
	o.Name = orders
	c.Outboxes = []outbox.Outbox{o}
	in, err := outbox.New(c)
	if err != nil {
		return nil, err
	}
	if err := db.Use(in); err != nil {
		return nil, err
	}
	return in, in.AutoMigrate(ctx)
}

// discard is a relay that does nothing.
type discard struct{}

// Deliver implements outbox.Relay.
func (discard) Deliver(context.Context, []outbox.Envelope) error { return nil }

// counter is a relay that does nothing but count.
type counter struct {
	left atomic.Int64
	done chan struct{}
}

// expect begins to count. The channel is closed at the n-th message.
func (c *counter) expect(n int) <-chan struct{} {
	c.done = make(chan struct{})
	c.left.Store(int64(n))
	return c.done
}

// Deliver implements outbox.Relay.
func (c *counter) Deliver(_ context.Context, batch []outbox.Envelope) error {
	if c.left.Add(-int64(len(batch))) == 0 {
		close(c.done)
	}
	return nil
}

// drain runs the instance until its relay has got n messages and they are
// settled, and returns the messages a second.
func drain(ctx context.Context, in *outbox.Instance, relay *counter, n int) (float64, error) {
	done := relay.expect(n)
	begun := time.Now()
	if err := in.Start(ctx); err != nil {
		return 0, err
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
	if err := in.Stop(context.WithoutCancel(ctx)); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return perSecond(n, time.Since(begun)), nil
}

func perSecond(n int, took time.Duration) float64 { return float64(n) / took.Seconds() }

// requireEmpty fails if messages are left.
func requireEmpty(ctx context.Context, db *gorm.DB) error {
	var left int64
	if err := db.WithContext(ctx).Table(outbox.DefaultTable).Count(&left).Error; err != nil {
		return err
	}
	if left > 0 {
		return fmt.Errorf("%d messages are left in the table", left)
	}
	return nil
}
